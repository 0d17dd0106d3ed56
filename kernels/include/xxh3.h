// XXH3, 64 bits, seed 0, default secret: the digest of slices and snapshots.
//
// Written from the published algorithm description (xxHash, doc/xxhash_spec.md, section "XXH3
// Algorithm Overview"); tests compare every path with the xxhash package. The same text compiles
// as host C++17, with nvcc and with NVRTC, so it includes no standard header.
//
// Three interfaces:
//   xxh3_64(data, nbytes)                     one piece of memory
//   xxh3_reset / xxh3_update / xxh3_digest    one string that arrives in pieces
//   xxh3_round / xxh3_scramble_lane           one accumulator, for callers that spread the eight
//                                             accumulators of a stripe over lanes
#ifndef TUTTI_XXH3_H_
#define TUTTI_XXH3_H_

#ifndef GIO_HD
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GIO_HD __host__ __device__ __forceinline__
#else
#define GIO_HD inline __attribute__((always_inline))
#endif
#endif

namespace tutti {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "XXH3 needs 32 and 64 bit words");

constexpr u32 kXxh3StripeBytes = 64;
constexpr u32 kXxh3Lanes = 8;
constexpr u32 kXxh3SecretBytes = 192;
// Each stripe advances by 8 bytes in the secret, so this many stripes fit before a scramble.
constexpr u32 kXxh3StripesPerBlock = (kXxh3SecretBytes - kXxh3StripeBytes) / 8;
constexpr u32 kXxh3BufferBytes = 256;
constexpr u32 kXxh3MidBytesMax = 240;
// Offsets in the secret of the scramble, the last stripe and the final merge.
constexpr u32 kXxh3ScrambleOffset = kXxh3SecretBytes - kXxh3StripeBytes;
constexpr u32 kXxh3LastStripeOffset = kXxh3ScrambleOffset - 7;
constexpr u32 kXxh3MergeOffset = 11;

constexpr u32 kXxh3Prime32A = 0x9E3779B1U;
constexpr u32 kXxh3Prime32B = 0x85EBCA77U;
constexpr u32 kXxh3Prime32C = 0xC2B2AE3DU;
constexpr u64 kXxh3Prime64A = 0x9E3779B185EBCA87ULL;
constexpr u64 kXxh3Prime64B = 0xC2B2AE3D27D4EB4FULL;
constexpr u64 kXxh3Prime64C = 0x165667B19E3779F9ULL;
constexpr u64 kXxh3Prime64D = 0x85EBCA77C2B2AE63ULL;
constexpr u64 kXxh3Prime64E = 0x27D4EB2F165667C5ULL;
constexpr u64 kXxh3MixA = 0x165667919E3779F9ULL;
constexpr u64 kXxh3MixB = 0x9FB21C651E98DF25ULL;

// Device code cannot index a host constant and has its tables in constant memory.
#if defined(__CUDA_ARCH__)
#define TUTTI_XXH3_TABLE static __constant__
#define TUTTI_XXH3_CONSTEXPR
#else
#define TUTTI_XXH3_TABLE constexpr
#define TUTTI_XXH3_CONSTEXPR constexpr
#endif
// The default secret as little-endian words.
TUTTI_XXH3_TABLE u64 kXxh3SecretWords[kXxh3SecretBytes / 8] = {
    0xBE4BA423396CFEB8ULL, 0x1CAD21F72C81017CULL, 0xDB979083E96DD4DEULL, 0x1F67B3B7A4A44072ULL,
    0x78E5C0CC4EE679CBULL, 0x2172FFCC7DD05A82ULL, 0x8E2443F7744608B8ULL, 0x4C263A81E69035E0ULL,
    0xCB00C391BB52283CULL, 0xA32E531B8B65D088ULL, 0x4EF90DA297486471ULL, 0xD8ACDEA946EF1938ULL,
    0x3F349CE33F76FAA8ULL, 0x1D4F0BC7C7BBDCF9ULL, 0x3159B4CD4BE0518AULL, 0x647378D9C97E9FC8ULL,
    0xC3EBD33483ACC5EAULL, 0xEB6313FAFFA081C5ULL, 0x49DAF0B751DD0D17ULL, 0x9E68D429265516D3ULL,
    0xFCA1477D58BE162BULL, 0xCE31D07AD1B8F88FULL, 0x280416958F3ACB45ULL, 0x7E404BBBCAFBD7AFULL};

// The 8 bytes of the default secret that begin at `offset` (0..184), as a little-endian word.
GIO_HD TUTTI_XXH3_CONSTEXPR u64 xxh3_secret64(u32 offset) {
  const u32 word = offset >> 3;
  const u32 shift = (offset & 7) * 8;
  if (shift == 0) return kXxh3SecretWords[word];
  return (kXxh3SecretWords[word] >> shift) | (kXxh3SecretWords[word + 1] << (64 - shift));
}

GIO_HD u64 xxh3_read64(const u8* p) {
#if defined(__CUDA_ARCH__)
  if ((reinterpret_cast<u64>(p) & 7) == 0) return *reinterpret_cast<const u64*>(p);
  u64 value = 0;
  for (u32 i = 0; i < 8; ++i) value |= static_cast<u64>(p[i]) << (8 * i);
  return value;
#else
  u64 value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
#endif
}

GIO_HD u64 xxh3_read32(const u8* p) {
  return static_cast<u64>(p[0]) | static_cast<u64>(p[1]) << 8 | static_cast<u64>(p[2]) << 16 |
         static_cast<u64>(p[3]) << 24;
}

GIO_HD void xxh3_copy(u8* to, const u8* from, u64 nbytes) {
#if defined(__CUDA_ARCH__)
  for (u64 i = 0; i < nbytes; ++i) to[i] = from[i];
#else
  __builtin_memcpy(to, from, nbytes);
#endif
}

GIO_HD u64 xxh3_rotate_left(u64 value, u32 bits) {
  return (value << bits) | (value >> (64 - bits));
}

GIO_HD u64 xxh3_swap_bytes(u64 value) {
  value = ((value & 0x00FF00FF00FF00FFULL) << 8) | ((value >> 8) & 0x00FF00FF00FF00FFULL);
  value = ((value & 0x0000FFFF0000FFFFULL) << 16) | ((value >> 16) & 0x0000FFFF0000FFFFULL);
  return (value << 32) | (value >> 32);
}

// The two halves of the 128-bit product, xored.
GIO_HD u64 xxh3_fold(u64 a, u64 b) {
#if defined(__CUDA_ARCH__)
  return (a * b) ^ __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
#endif
}

GIO_HD u64 xxh3_avalanche(u64 hash) {
  hash ^= hash >> 37;
  hash *= kXxh3MixA;
  return hash ^ (hash >> 32);
}

// XXH64's finaliser, which XXH3 uses for inputs below 4 bytes.
GIO_HD u64 xxh3_avalanche_tiny(u64 hash) {
  hash ^= hash >> 33;
  hash *= kXxh3Prime64B;
  hash ^= hash >> 29;
  hash *= kXxh3Prime64C;
  return hash ^ (hash >> 32);
}

GIO_HD u64 xxh3_mix16(const u8* p, u32 secret_offset) {
  return xxh3_fold(xxh3_read64(p) ^ xxh3_secret64(secret_offset),
                   xxh3_read64(p + 8) ^ xxh3_secret64(secret_offset + 8));
}

GIO_HD u64 xxh3_0to16(const u8* p, u64 nbytes) {
  if (nbytes > 8) {
    const u64 low = xxh3_read64(p) ^ xxh3_secret64(24) ^ xxh3_secret64(32);
    const u64 high = xxh3_read64(p + nbytes - 8) ^ xxh3_secret64(40) ^ xxh3_secret64(48);
    return xxh3_avalanche(nbytes + xxh3_swap_bytes(low) + high + xxh3_fold(low, high));
  }
  if (nbytes >= 4) {
    const u64 joined = xxh3_read32(p + nbytes - 4) + (xxh3_read32(p) << 32);
    u64 hash = joined ^ xxh3_secret64(8) ^ xxh3_secret64(16);
    hash ^= xxh3_rotate_left(hash, 49) ^ xxh3_rotate_left(hash, 24);
    hash *= kXxh3MixB;
    hash ^= (hash >> 35) + nbytes;
    hash *= kXxh3MixB;
    return hash ^ (hash >> 28);
  }
  if (nbytes > 0) {
    const u64 joined = static_cast<u64>(p[0]) << 16 | static_cast<u64>(p[nbytes >> 1]) << 24 |
                       static_cast<u64>(p[nbytes - 1]) | nbytes << 8;
    const u64 flip = (xxh3_secret64(0) ^ xxh3_secret64(4)) & 0xFFFFFFFFULL;
    return xxh3_avalanche_tiny(joined ^ flip);
  }
  return xxh3_avalanche_tiny(xxh3_secret64(56) ^ xxh3_secret64(64));
}

// Pairs of 16-byte pieces, from both ends towards the middle.
GIO_HD u64 xxh3_17to128(const u8* p, u64 nbytes) {
  u64 sum = nbytes * kXxh3Prime64A;
  const u32 pairs = static_cast<u32>((nbytes - 1) / 32) + 1;
  for (u32 i = 0; i < pairs; ++i) {
    sum += xxh3_mix16(p + 16 * i, 32 * i);
    sum += xxh3_mix16(p + nbytes - 16 * (i + 1), 32 * i + 16);
  }
  return xxh3_avalanche(sum);
}

GIO_HD u64 xxh3_129to240(const u8* p, u64 nbytes) {
  u64 sum = nbytes * kXxh3Prime64A;
  for (u32 i = 0; i < 8; ++i) sum += xxh3_mix16(p + 16 * i, 16 * i);
  sum = xxh3_avalanche(sum);
  const u32 pieces = static_cast<u32>(nbytes / 16);
  for (u32 i = 8; i < pieces; ++i) sum += xxh3_mix16(p + 16 * i, 16 * (i - 8) + 3);
  sum += xxh3_mix16(p + nbytes - 16, 136 - 17);
  return xxh3_avalanche(sum);
}

// One accumulator after one stripe: `word` is the stripe's word of this lane, `neighbour` the word
// of lane ^ 1, `secret` the secret's word of this lane.
GIO_HD u64 xxh3_round(u64 acc, u64 word, u64 neighbour, u64 secret) {
  const u64 keyed = word ^ secret;
  return acc + neighbour + (keyed & 0xFFFFFFFFULL) * (keyed >> 32);
}

GIO_HD u64 xxh3_scramble_lane(u64 acc, u32 lane) {
  return (acc ^ (acc >> 47) ^ xxh3_secret64(kXxh3ScrambleOffset + 8 * lane)) * kXxh3Prime32A;
}

TUTTI_XXH3_TABLE u64 kXxh3InitialWords[kXxh3Lanes] = {kXxh3Prime32C, kXxh3Prime64A, kXxh3Prime64B,
                                                      kXxh3Prime64C, kXxh3Prime64D, kXxh3Prime32B,
                                                      kXxh3Prime64E, kXxh3Prime32A};

GIO_HD u64 xxh3_initial_lane(u32 lane) { return kXxh3InitialWords[lane]; }

GIO_HD void xxh3_accumulate(u64* acc, const u8* stripe, u32 secret_offset) {
  for (u32 lane = 0; lane < kXxh3Lanes; lane += 2) {
    const u64 even = xxh3_read64(stripe + 8 * lane);
    const u64 odd = xxh3_read64(stripe + 8 * lane + 8);
    const u32 offset = secret_offset + 8 * lane;
    acc[lane] = xxh3_round(acc[lane], even, odd, xxh3_secret64(offset));
    acc[lane + 1] = xxh3_round(acc[lane + 1], odd, even, xxh3_secret64(offset + 8));
  }
}

GIO_HD u64 xxh3_merge(const u64* acc, u64 nbytes) {
  u64 hash = nbytes * kXxh3Prime64A;
  for (u32 lane = 0; lane < kXxh3Lanes; lane += 2) {
    const u32 offset = kXxh3MergeOffset + 8 * lane;
    hash += xxh3_fold(acc[lane] ^ xxh3_secret64(offset), acc[lane + 1] ^ xxh3_secret64(offset + 8));
  }
  return xxh3_avalanche(hash);
}

// Adds `stripes` whole stripes to the accumulators; `in_block` counts stripes since the last
// scramble. xxh3_update takes other implementations (vector units) in its place.
struct Xxh3ScalarStripes {
  GIO_HD static void run(u64* acc, const u8* p, u64 stripes, u32* in_block) {
    for (u64 i = 0; i < stripes; ++i) {
      xxh3_accumulate(acc, p + i * kXxh3StripeBytes, 8 * *in_block);
      if (++*in_block < kXxh3StripesPerBlock) continue;
      for (u32 lane = 0; lane < kXxh3Lanes; ++lane) acc[lane] = xxh3_scramble_lane(acc[lane], lane);
      *in_block = 0;
    }
  }
};

struct xxh3_state {
  alignas(64) u64 acc[kXxh3Lanes];
  // Bytes that are not accumulated yet. If fewer than 64 are left, the last 64 bytes of the buffer
  // still contain the end of the accumulated part, which the last stripe overlaps.
  u8 buffer[kXxh3BufferBytes];
  u64 total;
  u32 buffered;
  u32 in_block;
};

GIO_HD void xxh3_reset(xxh3_state* state) {
  for (u32 lane = 0; lane < kXxh3Lanes; ++lane) state->acc[lane] = xxh3_initial_lane(lane);
  state->total = 0;
  state->buffered = 0;
  state->in_block = 0;
}

// Appends `nbytes` of `p`. A stripe is accumulated only when at least one byte follows it, because
// the last stripe of a string is keyed differently.
template <class Stripes = Xxh3ScalarStripes>
GIO_HD void xxh3_update(xxh3_state* state, const u8* p, u64 nbytes) {
  state->total += nbytes;
  if (nbytes <= kXxh3BufferBytes - state->buffered) {
    if (nbytes > 0) xxh3_copy(state->buffer + state->buffered, p, nbytes);
    state->buffered += static_cast<u32>(nbytes);
    return;
  }
  if (state->buffered > 0) {
    const u32 fill = kXxh3BufferBytes - state->buffered;
    if (fill > 0) xxh3_copy(state->buffer + state->buffered, p, fill);
    p += fill;
    nbytes -= fill;
    Stripes::run(state->acc, state->buffer, kXxh3BufferBytes / kXxh3StripeBytes, &state->in_block);
  }
  if (nbytes > kXxh3BufferBytes) {
    const u64 stripes = (nbytes - 1) / kXxh3StripeBytes;
    Stripes::run(state->acc, p, stripes, &state->in_block);
    p += stripes * kXxh3StripeBytes;
    nbytes -= stripes * kXxh3StripeBytes;
    xxh3_copy(state->buffer + kXxh3BufferBytes - kXxh3StripeBytes, p - kXxh3StripeBytes,
              kXxh3StripeBytes);
  }
  xxh3_copy(state->buffer, p, nbytes);
  state->buffered = static_cast<u32>(nbytes);
}

GIO_HD u64 xxh3_short(const u8* p, u64 nbytes) {
  if (nbytes <= 16) return xxh3_0to16(p, nbytes);
  if (nbytes <= 128) return xxh3_17to128(p, nbytes);
  return xxh3_129to240(p, nbytes);
}

// The hash of everything appended so far; the state may be appended to afterwards.
template <class Stripes = Xxh3ScalarStripes>
GIO_HD u64 xxh3_digest(const xxh3_state* state) {
  if (state->total <= kXxh3MidBytesMax) return xxh3_short(state->buffer, state->total);
  alignas(64) u64 acc[kXxh3Lanes];
  for (u32 lane = 0; lane < kXxh3Lanes; ++lane) acc[lane] = state->acc[lane];
  u32 in_block = state->in_block;
  const u32 buffered = state->buffered;
  Stripes::run(acc, state->buffer, (buffered - 1) / kXxh3StripeBytes, &in_block);
  if (buffered >= kXxh3StripeBytes) {
    const u8* last = state->buffer + buffered - kXxh3StripeBytes;
    xxh3_accumulate(acc, last, kXxh3LastStripeOffset);
  } else {
    u8 last[kXxh3StripeBytes];
    const u32 earlier = kXxh3StripeBytes - buffered;
    xxh3_copy(last, state->buffer + kXxh3BufferBytes - earlier, earlier);
    xxh3_copy(last + earlier, state->buffer, buffered);
    xxh3_accumulate(acc, last, kXxh3LastStripeOffset);
  }
  return xxh3_merge(acc, state->total);
}

// The hash of one piece of memory.
template <class Stripes = Xxh3ScalarStripes>
GIO_HD u64 xxh3_64(const void* data, u64 nbytes) {
  const u8* p = static_cast<const u8*>(data);
  if (nbytes <= kXxh3MidBytesMax) return xxh3_short(p, nbytes);
  alignas(64) u64 acc[kXxh3Lanes];
  for (u32 lane = 0; lane < kXxh3Lanes; ++lane) acc[lane] = xxh3_initial_lane(lane);
  u32 in_block = 0;
  Stripes::run(acc, p, (nbytes - 1) / kXxh3StripeBytes, &in_block);
  xxh3_accumulate(acc, p + nbytes - kXxh3StripeBytes, kXxh3LastStripeOffset);
  return xxh3_merge(acc, nbytes);
}

}  // namespace tutti

#endif  // TUTTI_XXH3_H_

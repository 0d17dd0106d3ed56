// XXH3-64 for the host, with AVX2 or AVX-512 for the stripes if the processor has them.
#include "hash.h"

// GCC 12 warns about the undefined pass-through operand in its own AVX-512 intrinsics (GCC bug
// 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "xxh3.h"

namespace {

using tutti::kXxh3Lanes;
using tutti::kXxh3Prime32A;
using tutti::kXxh3ScrambleOffset;
using tutti::kXxh3SecretBytes;
using tutti::kXxh3StripeBytes;
using tutti::kXxh3StripesPerBlock;
using tutti::Segment;
using tutti::u32;
using tutti::u64;
using tutti::u8;

// Prefetch distance: far enough that the line has arrived, near enough that it is still in L1.
constexpr u32 kPrefetchBytes = 1024;

// What a block adds to the accumulators does not depend on them.  So groups of blocks are read as
// several streams, because a processor that reads one waits for memory most of the time.  In a full
// group a stream has 17 or 34 blocks, so that not all are in the same set of a cache.
constexpr u32 kBlockBytes = kXxh3StripesPerBlock * kXxh3StripeBytes;
constexpr u32 kGroupBlocksMax = 136;
constexpr u32 kStreamBlocksMin = 4;  // with fewer blocks each, one stream is as fast

struct Secret {
  alignas(64) u64 words[kXxh3SecretBytes / 8];
};

constexpr Secret make_secret() {
  Secret secret{};
  for (u32 i = 0; i < kXxh3SecretBytes / 8; ++i) secret.words[i] = tutti::xxh3_secret64(8 * i);
  return secret;
}

// In memory these words are the secret's bytes, because the targets are little-endian.
constexpr Secret kSecret = make_secret();

const u8* secret_at(u32 offset) { return reinterpret_cast<const u8*>(kSecret.words) + offset; }

u32 stripes_until_scramble(u64 stripes, u32 in_block) {
  const u32 room = kXxh3StripesPerBlock - in_block;
  return stripes < room ? static_cast<u32>(stripes) : room;
}

__attribute__((target("avx2"))) inline __m256i load256(const u8* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

__attribute__((target("avx2"))) inline __m256i round256(__m256i acc, __m256i data, __m256i secret) {
  const __m256i keyed = _mm256_xor_si256(data, secret);
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4E)));
}

__attribute__((target("avx2"))) inline __m256i scramble256(__m256i acc, __m256i secret) {
  const __m256i prime = _mm256_set1_epi64x(kXxh3Prime32A);
  const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), secret);
  const __m256i low = _mm256_mul_epu32(mixed, prime);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

struct Avx2Stripes {
  static constexpr u32 kStreams = 4;

  // Adds kStreams streams of `blocks` blocks each, one behind the other.
  __attribute__((target("avx2"))) static void add_group(u64* acc, const u8* p, u64 blocks) {
    __m256i sums[2 * kGroupBlocksMax];
    for (u64 block = 0; block < blocks; ++block, p += kBlockBytes) {
      __m256i all[2 * kStreams] = {};
      for (u32 i = 0; i < kXxh3StripesPerBlock; ++i) {
        const __m256i low = load256(secret_at(8 * i));
        const __m256i high = load256(secret_at(8 * i + 32));
#pragma GCC unroll 4
        for (u32 k = 0; k < kStreams; ++k) {
          const u8* const stripe = p + k * blocks * kBlockBytes + i * kXxh3StripeBytes;
          __builtin_prefetch(stripe + kPrefetchBytes);
          all[2 * k] = round256(all[2 * k], load256(stripe), low);
          all[2 * k + 1] = round256(all[2 * k + 1], load256(stripe + 32), high);
        }
      }
#pragma GCC unroll 8
      for (u32 k = 0; k < 2 * kStreams; ++k) sums[2 * (k / 2 * blocks + block) + k % 2] = all[k];
    }
    __m256i* const lanes = reinterpret_cast<__m256i*>(acc);
    for (u32 half = 0; half < 2; ++half) {
      const __m256i secret = load256(secret_at(kXxh3ScrambleOffset + 32 * half));
      __m256i sum = lanes[half];
      for (u64 i = half; i < 2 * kStreams * blocks; i += 2) {
        sum = scramble256(_mm256_add_epi64(sum, sums[i]), secret);
      }
      lanes[half] = sum;
    }
  }

  __attribute__((target("avx2"))) static void run(u64* acc, const u8* p, u64 stripes,
                                                  u32* in_block) {
    __m256i* const lanes = reinterpret_cast<__m256i*>(acc);
    __m256i low = _mm256_load_si256(lanes);
    __m256i high = _mm256_load_si256(lanes + 1);
    while (stripes > 0) {  // Bounded: every pass takes at least one stripe.
      const u32 count = stripes_until_scramble(stripes, *in_block);
      const u8* secret = secret_at(8 * *in_block);
#pragma GCC unroll 4
      for (u32 i = 0; i < count; ++i, p += kXxh3StripeBytes, secret += 8) {
        __builtin_prefetch(p + kPrefetchBytes);
        low = round256(low, load256(p), load256(secret));
        high = round256(high, load256(p + 32), load256(secret + 32));
      }
      stripes -= count;
      *in_block += count;
      if (*in_block < kXxh3StripesPerBlock) break;
      low = scramble256(low, load256(secret_at(kXxh3ScrambleOffset)));
      high = scramble256(high, load256(secret_at(kXxh3ScrambleOffset + 32)));
      *in_block = 0;
    }
    _mm256_store_si256(lanes, low);
    _mm256_store_si256(lanes + 1, high);
  }
};

__attribute__((target("avx512f"))) inline __m512i round512(__m512i acc, __m512i data,
                                                           __m512i secret) {
  const __m512i keyed = _mm512_xor_si512(data, secret);
  const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
  const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
  return _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
}

__attribute__((target("avx512f"))) inline __m512i scramble512(__m512i acc, __m512i secret) {
  const __m512i prime = _mm512_set1_epi64(kXxh3Prime32A);
  const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), secret);
  const __m512i low = _mm512_mul_epu32(mixed, prime);
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  return _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
}

struct Avx512Stripes {
  static constexpr u32 kStreams = 8;

  // As that of Avx2Stripes.
  __attribute__((target("avx512f"))) static void add_group(u64* acc, const u8* p, u64 blocks) {
    __m512i sums[kGroupBlocksMax];
    for (u64 block = 0; block < blocks; ++block, p += kBlockBytes) {
      __m512i all[kStreams] = {};
      for (u32 i = 0; i < kXxh3StripesPerBlock; ++i) {
        const __m512i secret = _mm512_loadu_si512(secret_at(8 * i));
#pragma GCC unroll 8
        for (u32 k = 0; k < kStreams; ++k) {
          const u8* const stripe = p + k * blocks * kBlockBytes + i * kXxh3StripeBytes;
          __builtin_prefetch(stripe + kPrefetchBytes);
          all[k] = round512(all[k], _mm512_loadu_si512(stripe), secret);
        }
      }
#pragma GCC unroll 8
      for (u32 k = 0; k < kStreams; ++k) sums[k * blocks + block] = all[k];
    }
    const __m512i secret = _mm512_loadu_si512(secret_at(kXxh3ScrambleOffset));
    __m512i sum = _mm512_load_si512(acc);
    for (u64 i = 0; i < kStreams * blocks; ++i) {
      sum = scramble512(_mm512_add_epi64(sum, sums[i]), secret);
    }
    _mm512_store_si512(acc, sum);
  }

  __attribute__((target("avx512f"))) static void run(u64* acc, const u8* p, u64 stripes,
                                                     u32* in_block) {
    __m512i sum = _mm512_load_si512(acc);
    while (stripes > 0) {  // Bounded: every pass takes at least one stripe.
      const u32 count = stripes_until_scramble(stripes, *in_block);
      const u8* secret = secret_at(8 * *in_block);
#pragma GCC unroll 4
      for (u32 i = 0; i < count; ++i, p += kXxh3StripeBytes, secret += 8) {
        __builtin_prefetch(p + kPrefetchBytes);
        sum = round512(sum, _mm512_loadu_si512(p), _mm512_loadu_si512(secret));
      }
      stripes -= count;
      *in_block += count;
      if (*in_block < kXxh3StripesPerBlock) break;
      sum = scramble512(sum, _mm512_loadu_si512(secret_at(kXxh3ScrambleOffset)));
      *in_block = 0;
    }
    _mm512_store_si512(acc, sum);
  }
};

// Groups of blocks as several streams, and the rest as one.
template <class Stripes>
struct Streams {
  static void run(u64* acc, const u8* p, u64 stripes, u32* in_block) {
    constexpr u32 kStripes = Stripes::kStreams * kXxh3StripesPerBlock;
    if (*in_block != 0 && stripes > kStreamBlocksMin * kStripes) {
      const u32 first = stripes_until_scramble(stripes, *in_block);
      Stripes::run(acc, p, first, in_block);
      p += first * kXxh3StripeBytes;
      stripes -= first;
    }
    while (stripes >= kStreamBlocksMin * kStripes && *in_block == 0) {  // bounded: each takes some
      const u64 blocks = std::min<u64>(stripes / kStripes, kGroupBlocksMax / Stripes::kStreams);
      Stripes::add_group(acc, p, blocks);
      p += blocks * Stripes::kStreams * kBlockBytes;
      stripes -= blocks * kStripes;
    }
    Stripes::run(acc, p, stripes, in_block);
  }
};

u32 best_isa() {
  static const u32 best = __builtin_cpu_supports("avx512f") ? kTuttiIsaAvx512
                          : __builtin_cpu_supports("avx2")  ? kTuttiIsaAvx2
                                                            : kTuttiIsaScalar;
  return best;
}

// The digest of segment_at(0) to segment_at(n - 1) as one string; their number has no limit.
template <class Stripes, class SegmentAt>
u64 digest_segments(SegmentAt segment_at, u32 n) {
  if (n == 1) return tutti::xxh3_64<Stripes>(segment_at(0).p, segment_at(0).n);
  tutti::xxh3_state state;
  tutti::xxh3_reset(&state);
  for (u32 i = 0; i < n; ++i) {
    tutti::xxh3_update<Stripes>(&state, segment_at(i).p, segment_at(i).n);
  }
  return tutti::xxh3_digest<Stripes>(&state);
}

template <class SegmentAt>
u64 digest_with(u32 isa, SegmentAt segment_at, u32 n) {
  if (isa == kTuttiIsaAvx512) return digest_segments<Streams<Avx512Stripes>>(segment_at, n);
  if (isa == kTuttiIsaAvx2) return digest_segments<Streams<Avx2Stripes>>(segment_at, n);
  return digest_segments<tutti::Xxh3ScalarStripes>(segment_at, n);
}

// XXH3-128 of 17 to 128 bytes: pairs of 16-byte pieces, from the middle towards both ends.
void digest_128(const u8* p, u64 nbytes, u8* digest) {
  u64 low = nbytes * tutti::kXxh3Prime64A;
  u64 high = 0;
  for (u32 i = static_cast<u32>((nbytes - 1) / 32) + 1; i-- > 0;) {
    const u8* const first = p + 16 * i;
    const u8* const last = p + nbytes - 16 * (i + 1);
    low += tutti::xxh3_mix16(first, 32 * i);
    low ^= tutti::xxh3_read64(last) + tutti::xxh3_read64(last + 8);
    high += tutti::xxh3_mix16(last, 32 * i + 16);
    high ^= tutti::xxh3_read64(first) + tutti::xxh3_read64(first + 8);
  }
  const u64 mixed =
      low * tutti::kXxh3Prime64A + high * tutti::kXxh3Prime64D + nbytes * tutti::kXxh3Prime64B;
  const u64 words[2] = {__builtin_bswap64(0 - tutti::xxh3_avalanche(mixed)),
                        __builtin_bswap64(tutti::xxh3_avalanche(low + high))};
  std::memcpy(digest, words, sizeof words);
}

constexpr u32 kDigits = 16;  // decoded at a time

// Decodes 16 hexadecimal digits; false if some characters are not digits.
bool decode_digits(const u8* text, u8* bytes) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(text));
  const __m128i figure = _mm_sub_epi8(all, _mm_set1_epi8('0'));
  const __m128i small = _mm_or_si128(all, _mm_set1_epi8(0x20));
  const __m128i letter = _mm_sub_epi8(small, _mm_set1_epi8('a'));
  const __m128i is_figure = _mm_cmpeq_epi8(_mm_min_epu8(figure, _mm_set1_epi8(9)), figure);
  const __m128i is_letter = _mm_cmpeq_epi8(_mm_min_epu8(letter, _mm_set1_epi8(5)), letter);
  if (_mm_movemask_epi8(_mm_or_si128(is_figure, is_letter)) != 0xFFFF) return false;
  const __m128i of_letter = _mm_add_epi8(letter, _mm_set1_epi8(10));
  const __m128i value =
      _mm_or_si128(_mm_and_si128(is_figure, figure), _mm_and_si128(is_letter, of_letter));
  // The first digit of a pair is the high nibble; it is in the low byte of the word.
  const __m128i both = _mm_or_si128(_mm_slli_epi16(value, 4), _mm_srli_epi16(value, 8));
  const __m128i words = _mm_and_si128(both, _mm_set1_epi16(0xFF));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes), _mm_packus_epi16(words, words));
  return true;
}

// Decodes any even number of digits.
bool decode_name(const u8* text, u64 digits, u8* bytes) {
  u64 done = 0;
  for (; done + kDigits <= digits; done += kDigits) {
    if (!decode_digits(text + done, bytes + done / 2)) return false;
  }
  if (done == digits) return true;
  u8 rest[kDigits];
  u8 decoded[kDigits / 2];
  std::memset(rest, '0', sizeof rest);
  std::memcpy(rest, text + done, digits - done);
  if (!decode_digits(rest, decoded)) return false;
  std::memcpy(bytes + done / 2, decoded, (digits - done) / 2);
  return true;
}

}  // namespace

uint64_t tutti::xxh3_segments(const Segment* segments, uint32_t n) {
  return digest_with(best_isa(), [segments](u32 i) { return segments[i]; }, n);
}

uint32_t tutti_abi_version(void) { return kTuttiAbiVersion; }

uint32_t tutti_isa_best(void) { return best_isa(); }

uint64_t tutti_xxh3_64_isa(uint32_t isa, const uint64_t* addresses, const uint64_t* nbytes,
                           uint32_t n) {
  const auto segment_at = [addresses, nbytes](u32 i) {
    return Segment{reinterpret_cast<const u8*>(addresses[i]), nbytes[i]};
  };
  return digest_with(isa <= best_isa() ? isa : static_cast<u32>(kTuttiIsaScalar), segment_at, n);
}

uint64_t tutti_read_lines(const uint64_t* addresses, const uint64_t* nbytes, uint32_t n) {
  constexpr u32 kReadStreams = 16;  // with fewer it takes longer
  u64 sum = 0;
  for (u32 i = 0; i < n; ++i) {
    const u64 step = nbytes[i] / kReadStreams;
    const u8* p = reinterpret_cast<const u8*>(addresses[i]);
    for (const u8* const end = p + step; p < end; p += kXxh3StripeBytes) {
      for (u32 k = 0; k < kReadStreams; ++k) sum += tutti::xxh3_read64(p + k * step);
    }
  }
  return sum;
}

void tutti_object_keys(const uint8_t* fingerprint, const uint8_t* hashes, uint64_t n,
                       uint64_t nbytes, uint8_t* keys) {
  u8 both[kTuttiKeyBytes + kTuttiHashBytesMax];
  std::memcpy(both, fingerprint, kTuttiKeyBytes);
  for (u64 i = 0; i < n; ++i) {
    std::memcpy(both + kTuttiKeyBytes, hashes + i * nbytes, nbytes);
    digest_128(both, kTuttiKeyBytes + nbytes, keys + i * kTuttiKeyBytes);
  }
}

uint32_t tutti_named_keys(const uint8_t* fingerprint, const uint8_t* text, uint64_t n,
                          uint64_t nbytes, uint8_t* keys) {
  u8 both[kTuttiKeyBytes + kTuttiHashBytesMax];
  std::memcpy(both, fingerprint, kTuttiKeyBytes);
  const u64 digits = 2 * nbytes;
  for (u64 i = 0; i < n; ++i) {
    const u8* const name = text + i * (digits + 1);
    if (i + 1 < n && name[digits] != '\n') return 0;
    if (!decode_name(name, digits, both + kTuttiKeyBytes)) return 0;
    digest_128(both, kTuttiKeyBytes + nbytes, keys + i * kTuttiKeyBytes);
  }
  return 1;
}

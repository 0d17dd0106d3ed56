// XXH3-64 of one slice by one warp, with the copy of the slice in the same pass, and the comparison
// with the recorded digest.
//
// A block of 1024 bytes is 16 stripes of 8 accumulators.  Within a block the stripes are only added
// up.  So four lanes take the eight words of a stripe, the warp takes eight stripes at a time, and
// the sums over the stripes are exchanged before the scramble (xxHash, doc/xxhash_spec.md, section
// "XXH3 Algorithm Overview").
#pragma once

#include "copy.cuh"
#include "parameters.cuh"
#include "xxh3.h"

namespace gio {

// Direction of a slice's copy; kInPlace: no copy.
enum class Way : u32 { kToPages, kToStaging, kInPlace };

// One slice as a string of bytes, with its source and its target.  One is the slice's page, where
// the string is split into segments, the other is staging, where it is contiguous.
struct Slice {
  // By segment: the address of the segment minus its offset in the string.
  u64 sources[kSegmentsMax];
  u64 targets[kSegmentsMax];
  u32 end[kSegmentsMax];  // where the segment ends in the string
  u32 nbytes;
  bool passes_on;  // the bytes are copied as well

  GIO_HD Slice(const Iocb& io, u32 layer, u32 index, u64 staged, Way way)
      : passes_on(way != Way::kInPlace) {
    const u64 page = at<u32>(io.pages)[index];
    const u64* bases = at<u64>(io.bases) + static_cast<u64>(layer) * io.n_segments;
    u32 start = 0;
    GIO_UNROLL
    for (u32 k = 0; k < kSegmentsMax; ++k) {
      u64 paged = 0;
      if (k < io.n_segments) {
        paged = bases[k] + page * io.segment_stride[k] - start;
        start += io.segment_nbytes[k];
      }
      sources[k] = way == Way::kToPages ? staged : paged;
      targets[k] = way == Way::kToPages ? paged : staged;
      end[k] = start;
    }
    nbytes = start;
  }

  GIO_HD u64 source(u32 position) const { return place(sources, position); }
  GIO_HD u64 target(u32 position) const { return place(targets, position); }

  // Whether the string consists of whole units of `unit` bytes (a power of two), aligned on both
  // sides.
  GIO_HD bool has_units_of(u32 unit) const {
    u64 bits = 0;
    GIO_UNROLL
    for (u32 k = 0; k < kSegmentsMax; ++k) bits |= end[k] | sources[k] | targets[k];
    return (bits & (unit - 1)) == 0;
  }

 private:
  // Uses selects, not branches, so that the loads of a tile are issued back to back.
  GIO_HD u64 place(const u64* origins, u32 position) const {
    u64 origin = origins[kSegmentsMax - 1];
    GIO_UNROLL
    for (u32 k = kSegmentsMax - 1; k-- > 0;) origin = position < end[k] ? origins[k] : origin;
    return origin + position;
  }
};

// 16 bytes of the string: the two words of a stripe that one lane processes.
struct Words {
  u64 even, odd;
};

GIO_HD Words words_of(const Quad& quad) {
  return {quad.x | static_cast<u64>(quad.y) << 32, quad.z | static_cast<u64>(quad.w) << 32};
}

// A lane's two words of the secret, from `offset` on.
GIO_HD Words secret_at(u32 offset) {
  return {tutti::xxh3_secret64(offset), tutti::xxh3_secret64(offset + 8)};
}

GIO_HD void add_words(Words* sum, const Words& data, const Words& secret) {
  sum->even = tutti::xxh3_round(sum->even, data.even, data.odd, secret.even);
  sum->odd = tutti::xxh3_round(sum->odd, data.odd, data.even, secret.odd);
}

// Sums over the lanes with the same lane index modulo four.
GIO_HD Words across_stripes(Words sum) {
  GIO_UNROLL
  for (u32 apart = 4; apart < kLanes; apart *= 2) {
    sum.even += __shfl_xor_sync(kAllLanes, sum.even, apart);
    sum.odd += __shfl_xor_sync(kAllLanes, sum.odd, apart);
  }
  return sum;
}

constexpr u32 kDigestBlockNbytes = 1024;
constexpr u32 kDigestHalfNbytes = kDigestBlockNbytes / 2;
constexpr u32 kDigestTileNbytes = kLoadsInFlight * kDigestHalfNbytes;
static_assert(kDigestBlockNbytes == 64 * tutti::kXxh3StripesPerBlock, "16 stripes");

// Keeps a lane's words of constant memory in registers, by a shuffle.  Otherwise the compiler would
// read them again for every block, and reads of different words by the lanes are serialized.
GIO_HD Words kept(const Words& words) {
  return {__shfl_sync(kAllLanes, words.even, lane_index()),
          __shfl_sync(kAllLanes, words.odd, lane_index())};
}

// A lane's part of the accumulators, for strings of more than 240 bytes.
struct LaneDigest {
  Words total;
  Words secret[2];  // of the two halves of a block
  Words scramble;

  GIO_HD explicit LaneDigest(u32 lane) {
    const u32 pair = 16 * (lane % 4);
    total = {tutti::xxh3_initial_lane(2 * (lane % 4)),
             tutti::xxh3_initial_lane(2 * (lane % 4) + 1)};
    secret[0] = kept(secret_at(8 * (lane / 4) + pair));
    secret[1] = kept(secret_at(64 + 8 * (lane / 4) + pair));
    scramble = kept(secret_at(tutti::kXxh3ScrambleOffset + pair));
  }

  // Adds a block, or the `left` whole stripes of the last one.
  GIO_HD void add_block(const Quad& low, const Quad& high, u32 left) {
    const u32 stripe = lane_index() / 4;
    Words sum = {0, 0};
    if (stripe < left) add_words(&sum, words_of(low), secret[0]);
    if (stripe + 8 < left) add_words(&sum, words_of(high), secret[1]);
    sum = across_stripes(sum);
    total.even += sum.even;
    total.odd += sum.odd;
    if (left < tutti::kXxh3StripesPerBlock) return;
    total.even = (total.even ^ (total.even >> 47) ^ scramble.even) * tutti::kXxh3Prime32A;
    total.odd = (total.odd ^ (total.odd >> 47) ^ scramble.odd) * tutti::kXxh3Prime32A;
  }

  // Adds the last 64 bytes, which may overlap stripes already added, and returns the digest.
  GIO_HD u64 finish(const Quad& last, u32 nbytes) {
    const u32 pair = 16 * (lane_index() % 4);
    add_words(&total, words_of(last), secret_at(tutti::kXxh3LastStripeOffset + pair));
    const Words key = secret_at(tutti::kXxh3MergeOffset + pair);
    u64 hash = tutti::xxh3_fold(total.even ^ key.even, total.odd ^ key.odd);
    hash += __shfl_xor_sync(kAllLanes, hash, 1);
    hash += __shfl_xor_sync(kAllLanes, hash, 2);
    return tutti::xxh3_avalanche(hash + nbytes * tutti::kXxh3Prime64A);
  }
};

// Digest of a string of more than 240 bytes, with 16 bytes per lane: all loads of four blocks come
// first, then the stores of the copy, then the sums.
GIO_HD u64 warp_digest_quads(const Slice& slice) {
  const u32 offset = kLanes / 2 * lane_index();
  const u32 stripes = (slice.nbytes - 1) / tutti::kXxh3StripeBytes;
  // A quad of the last stripe.  Loads beyond the string's end are replaced by this one, which no
  // stripe uses: so there is no branch between a tile's loads, nor between its stores.
  const u32 end = slice.nbytes - tutti::kXxh3StripeBytes + offset % tutti::kXxh3StripeBytes;
  const Quad last = load_unit<Quad>(slice.source(end));  // under way with those of the first tile
  LaneDigest digest(lane_index());
  for (u32 base = 0; base < slice.nbytes; base += kDigestTileNbytes) {
    Quad quads[kLoadsInFlight];
    u32 position[kLoadsInFlight];
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; ++i) {
      position[i] = base + i * kDigestHalfNbytes + offset;
      if (position[i] >= slice.nbytes) position[i] = end;
      quads[i] = load_unit<Quad>(slice.source(position[i]));
    }
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight && slice.passes_on; ++i) {
      store_unit(slice.target(position[i]), quads[i]);
    }
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; i += 2) {
      const u32 first = (base + i * kDigestHalfNbytes) / tutti::kXxh3StripeBytes;
      if (first < stripes) digest.add_block(quads[i], quads[i + 1], stripes - first);
    }
  }
  return digest.finish(last, slice.nbytes);
}

constexpr u32 kWarpsMax = kBlockThreadsMax / kLanes;

// By warp: a buffer for a block of a string of any alignment.
struct Gathered {
  alignas(16) u8 bytes[kWarpsMax][kDigestBlockNbytes];
};

template <typename Unit>
GIO_HD void warp_gather_units(const Slice& slice, u8* bytes, u32 from, u32 to, bool passes_on) {
  const u32 step = kLanes * sizeof(Unit);
  const u32 first = from + lane_index() * sizeof(Unit);
  for (u32 base = first; base < to; base += step * kLoadsInFlight) {
    Unit units[kLoadsInFlight] = {};
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; ++i) {
      const u32 position = base + i * step;
      if (position < to) units[i] = load_unit<Unit>(slice.source(position));
    }
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; ++i) {
      const u32 position = base + i * step;
      if (position >= to) continue;
      *reinterpret_cast<Unit*>(bytes + (position - from)) = units[i];
      if (passes_on) store_unit(slice.target(position), units[i]);
    }
  }
}

// Gathers bytes [from, to) of the string into `bytes`, and copies them if passes_on.
GIO_HD void warp_gather(const Slice& slice, u8* bytes, u32 from, u32 to, bool passes_on) {
  if (slice.has_units_of(sizeof(u32))) {
    warp_gather_units<u32>(slice, bytes, from, to, passes_on);
  } else {
    warp_gather_units<u8>(slice, bytes, from, to, passes_on);
  }
  __syncwarp();
}

GIO_CALLED u64 digest_short(const u8* bytes, u32 nbytes) {
  return tutti::xxh3_short(bytes, nbytes);
}

GIO_HD Quad gathered_quad(const u8* bytes, u32 position) {
  return *reinterpret_cast<const Quad*>(bytes + position);
}

// Digest of any string, through shared memory.
GIO_HD u64 warp_digest_bytes(const Slice& slice) {
  GIO_SHARED(Gathered, gathered);
  u8* bytes = gathered.bytes[warp_index()];
  if (slice.nbytes <= tutti::kXxh3MidBytesMax) {
    warp_gather(slice, bytes, 0, slice.nbytes, slice.passes_on);
    u64 hash = 0;
    if (lane_index() == 0) hash = digest_short(bytes, slice.nbytes);
    return __shfl_sync(kAllLanes, hash, 0);
  }
  const u32 offset = kLanes / 2 * lane_index();
  const u32 stripes = (slice.nbytes - 1) / tutti::kXxh3StripeBytes;
  LaneDigest digest(lane_index());
  for (u32 base = 0; base < slice.nbytes; base += kDigestBlockNbytes) {
    const u32 left = slice.nbytes - base;
    const u32 end = base + (left < kDigestBlockNbytes ? left : kDigestBlockNbytes);
    warp_gather(slice, bytes, base, end, slice.passes_on);
    const u32 first = base / tutti::kXxh3StripeBytes;
    if (first < stripes) {
      digest.add_block(gathered_quad(bytes, offset),
                       gathered_quad(bytes, offset + kDigestHalfNbytes), stripes - first);
    }
    __syncwarp();
  }
  warp_gather(slice, bytes, slice.nbytes - tutti::kXxh3StripeBytes, slice.nbytes, false);
  const u64 hash =
      digest.finish(gathered_quad(bytes, offset % tutti::kXxh3StripeBytes), slice.nbytes);
  __syncwarp();
  return hash;
}

// Moves a slice and returns its digest to every lane.
GIO_HD u64 warp_digest(const Slice& slice) {
  const bool is_long = slice.nbytes > tutti::kXxh3MidBytesMax;
  return is_long && slice.has_units_of(sizeof(Quad)) ? warp_digest_quads(slice)
                                                     : warp_digest_bytes(slice);
}

// For a read, compares the digest with the recorded one, *kept: false if they differ.  For a write,
// records it.
GIO_HD bool digest_settles(u64* kept, u64 digest, bool is_read) {
  if (!is_read) *kept = digest;
  return *kept == digest;
}

}  // namespace gio

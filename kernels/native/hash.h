// XXH3-64 on the host, with the processor's widest instruction set; for other native files.
#ifndef TUTTI_NATIVE_HASH_H_
#define TUTTI_NATIVE_HASH_H_

#include <cstdint>

namespace tutti {

// One contiguous piece of a string that is scattered in memory.
struct Segment {
  const uint8_t* p;
  uint64_t n;
};

// The digest of the segments as one string.
uint64_t xxh3_segments(const Segment* segments, uint32_t n);

// Maps hashes evenly to 0 .. n - 1, by their high bits; n need not be a power of two.
inline uint64_t share_of(uint64_t hash, uint64_t n) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
}

}  // namespace tutti

#endif  // TUTTI_NATIVE_HASH_H_

// XXH3-64 on the host with the widest instruction set the processor has; for other native files.
#ifndef TUTTI_NATIVE_HASH_H_
#define TUTTI_NATIVE_HASH_H_

#include <cstdint>

namespace tutti {

// One contiguous piece of a string that lies scattered in memory.
struct Segment {
  const uint8_t* p;
  uint64_t n;
};

// The digest of the segments as one string.
uint64_t xxh3_segments(const Segment* segments, uint32_t n);

}  // namespace tutti

#endif  // TUTTI_NATIVE_HASH_H_

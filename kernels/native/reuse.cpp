// How often objects are used, and the cache of digests: arrays by slot, one call for the slots of a
// transfer. See tutti/placement/reuse.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "hash.h"

namespace {

// What is used as often as this outlasts so many generations of new objects, and no more.
constexpr uint8_t kUsesMax = 16;
constexpr uint64_t kMultipliers[] = {0x9E3779B97F4A7C15ULL, 0xC2B2AE3D27D4EB4FULL};

struct Ghost {
  uint64_t entry;
  uint16_t tag;
};

// Where a key is remembered after its eviction: the high bits choose the entry, others are its tag,
// never 0. Two keys of one entry have the same tag once in 32768 times; a counter does not notice.
Ghost ghost_of(const tutti_reuse* reuse, const uint8_t* key) {
  uint64_t words[2];
  static_assert(sizeof words == kTuttiKeyBytes, "a key is two words");
  std::memcpy(words, key, sizeof words);
  const uint64_t mixed = (words[0] * kMultipliers[0]) ^ ((words[1] * kMultipliers[1]) >> 29);
  const uint64_t hash = mixed * kMultipliers[0];
  return {tutti::share_of(hash, reuse->slots), static_cast<uint16_t>((hash >> 18) | 1)};
}

void use(tutti_reuse* reuse, int64_t slot, uint8_t uses, int64_t now) {
  reuse->uses[slot] = uses;
  reuse->value[slot] = reuse->age + uses;
  reuse->used[slot] = static_cast<uint32_t>(now);
}

bool are_slots(const int64_t* slots, uint64_t n, uint64_t end) {
  return std::all_of(slots, slots + n, [end](int64_t slot) {
    return slot >= 0 && static_cast<uint64_t>(slot) < end;
  });
}

}  // namespace

void tutti_reuse_evicted(tutti_reuse* reuse, const uint8_t* keys, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    const Ghost ghost = ghost_of(reuse, keys + i * kTuttiKeyBytes);
    reuse->tag[ghost.entry] = ghost.tag;
  }
}

int64_t tutti_reuse_loaded(tutti_reuse* reuse, const int64_t* slots, uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  for (uint64_t i = 0; i < n; ++i) {
    const int64_t slot = slots[i];
    if (reuse->used[slot] == static_cast<uint32_t>(now)) continue;  // twice in this load
    const uint8_t uses = reuse->uses[slot];
    use(reuse, slot, uses < kUsesMax ? static_cast<uint8_t>(uses + 1) : uses, now);
  }
  return static_cast<int64_t>(n);
}

int64_t tutti_reuse_stored(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                           uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  int64_t late = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const Ghost ghost = ghost_of(reuse, keys + i * kTuttiKeyBytes);
    if (reuse->tag[ghost.entry] == ghost.tag) {
      ++late;
      reuse->tag[ghost.entry] = 0;
    }
    use(reuse, slots[i], 1, now);
  }
  return late;
}

void tutti_digests_put(tutti_digests* cache, const int64_t* slots, const uint64_t* sequences,
                       uint64_t n, const uint64_t* digests) {
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t place = static_cast<uint64_t>(slots[i]) % cache->entries;
    cache->slot[place] = slots[i];
    cache->sequence[place] = sequences[i];
    std::memcpy(cache->digests + place * cache->layers, digests + i * cache->layers,
                8 * cache->layers);
  }
}

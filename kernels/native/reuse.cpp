// What loads teach about the next ones, and the cache of digests: arrays by slot, one call for the
// slots of a transfer. The estimates themselves are tutti/placement/reuse.py's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "hash.h"

namespace {

constexpr int64_t kLevels = 4;
constexpr int64_t kPerOctave = 8;
constexpr int64_t kBuckets = 32 * kPerOctave;
// Of an entry among the evicted keys: the bits of its tag, above those of its level; 0 is none.
constexpr uint16_t kTagBits = 0xFFFC;
constexpr uint64_t kMultipliers[] = {0x9E3779B97F4A7C15ULL, 0xC2B2AE3D27D4EB4FULL};

// The bucket of an age, which is counted in uses.
int64_t bucket(uint32_t used, int64_t now) {
  const int64_t age = std::max<int64_t>(now - int64_t{used}, 1);
  const auto place = static_cast<int64_t>(std::log2(static_cast<double>(age)) * kPerOctave);
  return std::min(place, kBuckets - 1);
}

void count(double* table, int64_t level, uint32_t used, int64_t now) {
  table[std::min(level, kLevels - 1) * kBuckets + bucket(used, now)] += 1.0;
}

uint8_t next_level(int64_t level) { return static_cast<uint8_t>(std::min(level + 1, kLevels - 1)); }

struct Ghost {
  uint64_t entry;
  uint16_t tag;
};

// Where a key is remembered after its eviction: the high bits choose the entry, others are its tag.
// Two keys of one entry have the same tag once in 8192 times; the estimates do not notice.
Ghost ghost_of(const tutti_reuse* reuse, const uint8_t* key) {
  uint64_t words[2];
  static_assert(sizeof words == kTuttiKeyBytes, "a key is two words");
  std::memcpy(words, key, sizeof words);
  const uint64_t mixed = (words[0] * kMultipliers[0]) ^ ((words[1] * kMultipliers[1]) >> 29);
  const uint64_t hash = mixed * kMultipliers[0];
  const auto tag = static_cast<uint16_t>(((hash >> 18) & kTagBits) | kLevels);
  return {tutti::share_of(hash, reuse->slots), tag};
}

bool are_slots(const int64_t* slots, uint64_t n, uint64_t end) {
  return std::all_of(slots, slots + n, [end](int64_t slot) {
    return slot >= 0 && static_cast<uint64_t>(slot) < end;
  });
}

}  // namespace

int64_t tutti_reuse_evicted(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                            uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  for (uint64_t i = 0; i < n; ++i) {
    const Ghost ghost = ghost_of(reuse, keys + i * kTuttiKeyBytes);
    const uint16_t found = reuse->tag[ghost.entry];
    uint32_t& used = reuse->ghost_used[ghost.entry];
    if (found != 0) count(reuse->censored, found % kLevels, used, now);
    reuse->tag[ghost.entry] = static_cast<uint16_t>(ghost.tag | reuse->level[slots[i]]);
    used = reuse->used[slots[i]];
  }
  return static_cast<int64_t>(n);
}

int64_t tutti_reuse_loaded(tutti_reuse* reuse, const int64_t* slots, uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  for (uint64_t i = 0; i < n; ++i) {
    const int64_t slot = slots[i];
    if (reuse->used[slot] == static_cast<uint32_t>(now)) continue;  // twice in this load
    count(reuse->reused, reuse->level[slot], reuse->used[slot], now);
    reuse->level[slot] = next_level(reuse->level[slot]);
    reuse->used[slot] = static_cast<uint32_t>(now);
  }
  return static_cast<int64_t>(n);
}

int64_t tutti_reuse_stored(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                           uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  int64_t late = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const Ghost ghost = ghost_of(reuse, keys + i * kTuttiKeyBytes);
    const uint16_t found = reuse->tag[ghost.entry];
    uint8_t level = 0;
    if ((found & kTagBits) == ghost.tag) {
      ++late;
      count(reuse->reused, found % kLevels, reuse->ghost_used[ghost.entry], now);
      level = next_level(found % kLevels);
      reuse->tag[ghost.entry] = 0;
    }
    reuse->level[slots[i]] = level;
    reuse->used[slots[i]] = static_cast<uint32_t>(now);
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

// Counts uses of objects, including evicted ones, and keeps the cache of digests, with one call per
// transfer. See tutti/placement/reuse.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "api.h"
#include "hash.h"

namespace {

constexpr uint32_t kNone = UINT32_MAX;
// Gaps per slot that are counted before all counts are halved, so that old gaps are forgotten.
constexpr uint64_t kGapsPerSlot = 8;
constexpr uint64_t kMultipliers[] = {0x9E3779B97F4A7C15ULL, 0xC2B2AE3D27D4EB4FULL};

uint64_t hash_of(const uint8_t* key) {
  uint64_t words[2];
  static_assert(sizeof words == kTuttiKeyBytes, "a key is two words");
  std::memcpy(words, key, sizeof words);
  const uint64_t mixed = (words[0] * kMultipliers[0]) ^ ((words[1] * kMultipliers[1]) >> 29);
  return mixed * kMultipliers[0];
}

// Identifies a key's ghost: its bucket, and a tag of the 32 hash bits below those that select the
// bucket. Two keys of a bucket have the same tag with a probability of 2^-32.
struct GhostName {
  uint64_t bucket;
  uint32_t tag;
};

GhostName name_of(const tutti_reuse* reuse, const uint8_t* key) {
  const uint64_t hash = hash_of(key);
  return {tutti::share_of(hash, reuse->buckets),
          static_cast<uint32_t>(hash * reuse->buckets >> 32)};
}

// The number of ghosts added after the one at this place of the ring.
uint64_t age_of(const tutti_reuse* reuse, uint32_t place) {
  return (place < reuse->oldest ? 0 : reuse->slots) + reuse->oldest - 1 - place;
}

// The place of the latest ghost of this name, or kNone. Links lead to older ghosts; a link to a
// newer ghost means that its place was reused, as were all places after it in the list. A bucket
// has four ghosts on average.
uint32_t find_ghost(const tutti_reuse* reuse, const GhostName& name) {
  uint32_t place = reuse->heads[name.bucket];
  while (place != kNone) {
    if (reuse->ghosts[place].tag == name.tag && reuse->ghost_uses[place] != 0) return place;
    const uint32_t next = reuse->ghosts[place].next;
    if (next == kNone || age_of(reuse, next) <= age_of(reuse, place)) return kNone;
    place = next;
  }
  return kNone;
}

// Counts the gap between the use `now` and the one before, at `then`.
void count_gap(tutti_reuse* reuse, int64_t now, uint32_t then) {
  if (then == 0) return;
  const uint32_t gap = static_cast<uint32_t>(now) - then;
  ++reuse->gaps[gap == 0 ? 0 : 32 - __builtin_clz(gap)];
  if (++reuse->gaps_sum < kGapsPerSlot * reuse->slots) return;
  reuse->gaps_sum = 0;
  for (uint64_t i = 0; i < kTuttiGaps; ++i) reuse->gaps_sum += reuse->gaps[i] /= 2;
}

void use(tutti_reuse* reuse, int64_t slot, uint8_t uses_before, int64_t now) {
  reuse->uses[slot] = static_cast<uint8_t>(uses_before + (uses_before != UINT8_MAX ? 1 : 0));
  reuse->used[slot] = static_cast<uint32_t>(now);
}

bool are_slots(const int64_t* slots, uint64_t n, uint64_t end) {
  return std::all_of(slots, slots + n, [end](int64_t slot) {
    return slot >= 0 && static_cast<uint64_t>(slot) < end;
  });
}

}  // namespace

int64_t tutti_reuse_evicted(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                            uint64_t n) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  for (uint64_t i = 0; i < n; ++i) {
    const auto place = static_cast<uint32_t>(reuse->oldest);
    const GhostName name = name_of(reuse, keys + i * kTuttiKeyBytes);
    uint32_t& head = reuse->heads[name.bucket];
    reuse->ghosts[place] = {name.tag, reuse->used[slots[i]], head};
    reuse->ghost_uses[place] = std::max<uint8_t>(reuse->uses[slots[i]], 1);
    head = place;
    reuse->oldest = (reuse->oldest + 1) % reuse->slots;
  }
  return static_cast<int64_t>(n);
}

int64_t tutti_reuse_loaded(tutti_reuse* reuse, const int64_t* slots, uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  for (uint64_t i = 0; i < n; ++i) {
    const int64_t slot = slots[i];
    if (reuse->used[slot] == static_cast<uint32_t>(now)) continue;  // twice in this load
    count_gap(reuse, now, reuse->used[slot]);
    use(reuse, slot, reuse->uses[slot], now);
  }
  return static_cast<int64_t>(n);
}

int64_t tutti_reuse_stored(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                           uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  int64_t late = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t ghost = find_ghost(reuse, name_of(reuse, keys + i * kTuttiKeyBytes));
    uint8_t uses = 0;
    if (ghost != kNone) {
      ++late;
      uses = std::exchange(reuse->ghost_uses[ghost], uint8_t{0});
      count_gap(reuse, now, reuse->ghosts[ghost].used);
    }
    use(reuse, slots[i], uses, now);
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

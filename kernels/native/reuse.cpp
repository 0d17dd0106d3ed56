// How often objects are used, also those that were evicted, and the cache of digests: one call for
// the slots of a transfer. See tutti/placement/reuse.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "hash.h"

namespace {

constexpr uint32_t kNone = UINT32_MAX;
// Gaps are counted up to so many a slot before all counts are halved, which forgets old ones.
constexpr uint64_t kGapsPerSlot = 8;
constexpr uint64_t kMultipliers[] = {0x9E3779B97F4A7C15ULL, 0xC2B2AE3D27D4EB4FULL};

uint64_t hash_of(const uint8_t* key) {
  uint64_t words[2];
  static_assert(sizeof words == kTuttiKeyBytes, "a key is two words");
  std::memcpy(words, key, sizeof words);
  const uint64_t mixed = (words[0] * kMultipliers[0]) ^ ((words[1] * kMultipliers[1]) >> 29);
  return mixed * kMultipliers[0];
}

// The link to a ghost of this hash, or kNone at the end of its bucket. Buckets are as many as
// ghosts, so that most have one at most; a bucket never has more than all.
template <typename IsIt>
uint32_t* find_link(const tutti_reuse* reuse, uint64_t hash, IsIt is_it) {
  uint32_t* link = &reuse->heads[tutti::share_of(hash, reuse->slots)];
  while (*link != kNone && !is_it(*link)) link = &reuse->ghosts[*link].next;
  return link;
}

void remove_ghost(tutti_reuse* reuse, uint32_t* link) {
  const uint32_t place = *link;
  *link = reuse->ghosts[place].next;
  reuse->ghost_uses[place] = 0;
}

// A use came `now`, after the one at `then`.
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
    tutti_ghost& ghost = reuse->ghosts[place];
    if (reuse->ghost_uses[place] != 0) {
      const auto is_it = [place](uint32_t other) { return other == place; };
      remove_ghost(reuse, find_link(reuse, ghost.hash, is_it));
    }
    const uint64_t hash = hash_of(keys + i * kTuttiKeyBytes);
    uint32_t& head = reuse->heads[tutti::share_of(hash, reuse->slots)];
    ghost = {hash, reuse->used[slots[i]], head};
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
    const uint64_t hash = hash_of(keys + i * kTuttiKeyBytes);
    const auto is_it = [reuse, hash](uint32_t place) { return reuse->ghosts[place].hash == hash; };
    uint32_t* const link = find_link(reuse, hash, is_it);
    uint8_t uses = 0;
    if (*link != kNone) {
      ++late;
      uses = reuse->ghost_uses[*link];
      count_gap(reuse, now, reuse->ghosts[*link].used);
      remove_ghost(reuse, link);
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

// Counts uses of objects, including evicted ones, and keeps the cache of digests, with one call per
// transfer. See tutti/placement/reuse.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>

#include "api.h"
#include "hash.h"

namespace {

constexpr uint32_t kNone = UINT32_MAX;
// Gaps per slot that are counted before all counts are halved, so that old gaps are forgotten.
constexpr uint64_t kGapsPerSlot = 8;
constexpr uint64_t kReferencesPerSlot = 16;  // as kGapsPerSlot
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

// Counts a reference to an object that had `uses`, the last at `then`, and whether it would hit if
// the pool kept as many objects as it has slots: those with the most uses (of equal ones a share),
// or those used last, by the rate of references so far.
void compare(tutti_reuse* reuse, uint8_t uses, uint32_t then, uint64_t now) {
  const uint64_t passed = static_cast<uint32_t>(now - reuse->since);
  if (uses != 0 && then != 0) {
    const uint32_t* known = reuse->known;
    const auto more = std::accumulate(known + uses + 1, known + UINT8_MAX + 1, uint64_t{0});
    const double room = static_cast<double>(reuse->slots) - static_cast<double>(more);
    reuse->hits[1] += std::clamp(room / known[uses], 0.0, 1.0);
    const uint64_t gap = static_cast<uint32_t>(now) - then;
    if (gap * reuse->references <= reuse->slots * passed) reuse->hits[2] += 1;
  }
  if (++reuse->references < kReferencesPerSlot * reuse->slots) return;
  reuse->references /= 2;
  reuse->since += passed / 2;
  for (double& hits : reuse->hits) hits /= 2;
}

// Counts a use of an object, the next after these; returns how many it has now. A second one at the
// same time is not counted.
uint8_t use(tutti_reuse* reuse, uint8_t uses, uint32_t then, int64_t now) {
  if (uses != 0 && then == static_cast<uint32_t>(now)) return uses;
  count_gap(reuse, now, then);
  compare(reuse, uses, then, static_cast<uint64_t>(now));
  --reuse->known[uses];  // the count for 0 has no meaning
  if (uses != UINT8_MAX) ++uses;
  ++reuse->known[uses];
  return uses;
}

// Makes a key the latest ghost, in place of the oldest one.
void remember(tutti_reuse* reuse, const GhostName& name, uint8_t uses, uint32_t used) {
  const auto place = static_cast<uint32_t>(reuse->oldest);
  uint32_t& head = reuse->heads[name.bucket];
  --reuse->known[reuse->ghost_uses[place]];
  reuse->ghosts[place] = {name.tag, used, head};
  reuse->ghost_uses[place] = uses;
  head = place;
  reuse->oldest = (reuse->oldest + 1) % reuse->slots;
}

// Removes the ghost of a key; returns its uses, 0 if there is none, and the time of the last.
std::pair<uint8_t, uint32_t> forget(tutti_reuse* reuse, const GhostName& name) {
  const uint32_t ghost = find_ghost(reuse, name);
  if (ghost == kNone) return {uint8_t{0}, 0};
  return {std::exchange(reuse->ghost_uses[ghost], uint8_t{0}), reuse->ghosts[ghost].used};
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
    const uint8_t uses = std::exchange(reuse->uses[slots[i]], uint8_t{0});
    if (uses == 0) ++reuse->known[1];
    const GhostName name = name_of(reuse, keys + i * kTuttiKeyBytes);
    remember(reuse, name, std::max<uint8_t>(uses, 1), reuse->used[slots[i]]);
  }
  return static_cast<int64_t>(n);
}

int64_t tutti_reuse_loaded(tutti_reuse* reuse, const int64_t* slots, uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  for (uint64_t i = 0; i < n; ++i) {
    const int64_t slot = slots[i];
    if (reuse->used[slot] == static_cast<uint32_t>(now)) continue;  // twice in this load
    reuse->hits[0] += 1;
    reuse->uses[slot] = use(reuse, reuse->uses[slot], reuse->used[slot], now);
    reuse->used[slot] = static_cast<uint32_t>(now);
  }
  return static_cast<int64_t>(n);
}

int64_t tutti_reuse_stored(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                           uint64_t n, int64_t now) {
  if (!are_slots(slots, n, reuse->slots)) return -1;
  int64_t late = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const auto [uses, then] = forget(reuse, name_of(reuse, keys + i * kTuttiKeyBytes));
    late += uses != 0 && then != static_cast<uint32_t>(now) ? 1 : 0;
    --reuse->known[reuse->uses[slots[i]]];  // of an object that was deleted
    reuse->uses[slots[i]] = use(reuse, uses, then, now);
    reuse->used[slots[i]] = static_cast<uint32_t>(now);
  }
  return late;
}

int64_t tutti_reuse_missed(tutti_reuse* reuse, const uint8_t* keys, uint64_t n, int64_t since,
                           int64_t now) {
  uint8_t most = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const GhostName name = name_of(reuse, keys + i * kTuttiKeyBytes);
    const auto [before, then] = forget(reuse, name);
    const bool is_counted = before != 0 && then == static_cast<uint32_t>(since);
    const uint8_t uses = is_counted ? before : use(reuse, before, then, now);
    remember(reuse, name, uses, static_cast<uint32_t>(now));
    most = std::max(most, uses);
  }
  return most;
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

// An open-addressing hash table over arrays that the caller owns: linear probing, removal by
// shifting the following entries back, so that there are no tombstones and probes stay short.
//
// An entry has a tag: as many bits of its key's hash as fit above the slot (5 bits with 10^8 slots,
// none with more than 2^31). A probe reads a key only if the tag matches.
//
// Look-ups go in blocks: first every table entry of the block is prefetched, then the key that each
// probe will read first, then the keys are compared; so the cache misses of a block overlap.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "hash.h"

namespace {

constexpr uint64_t kBlock = 32;

struct Key {
  uint64_t low;
  uint64_t high;
};

bool operator==(const Key& a, const Key& b) { return a.low == b.low && a.high == b.high; }

Key load_key(const uint8_t* keys, uint64_t i) {
  Key key;
  static_assert(sizeof key == kTuttiKeyBytes, "a key is two words");
  std::memcpy(&key, keys + i * kTuttiKeyBytes, sizeof key);
  return key;
}

Key key_of(const tutti_index* index, uint32_t slot) {
  return {index->keys[2 * uint64_t{slot}], index->keys[2 * uint64_t{slot} + 1]};
}

// The start of the probe for a key, and the tag of its entry.
struct Place {
  uint64_t home;
  uint32_t tag;
};

// Both words are combined with the seed before the multiplication.
Place place_of(const tutti_index* index, const Key& key) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ULL;  // 2^64 over the golden ratio, odd.
  const uint64_t a = key.low ^ index->seed;
  const uint64_t b = key.high ^ (index->seed * golden + golden);
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  const uint64_t mixed = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  return {tutti::share_of(mixed, index->entries), static_cast<uint32_t>(mixed) & ~index->slot_mask};
}

uint32_t slot_at(const tutti_index* index, uint64_t position) {
  const uint32_t entry = index->table[position];
  return entry == kTuttiNoSlot ? kTuttiNoSlot : entry & index->slot_mask;
}

// Whether a probe skips an entry without reading its key.
bool is_other(const tutti_index* index, uint32_t entry, uint32_t tag) {
  return entry != kTuttiNoSlot && (entry & ~index->slot_mask) != tag;
}

// The first position of a probe that is empty or has the tag. The table is at most two thirds full,
// so an empty entry exists; the number of steps is bounded even in a damaged table.
uint64_t candidate(const tutti_index* index, const Place& place) {
  uint64_t position = place.home;
  for (uint64_t step = 0; step < index->entries; ++step) {
    if (!is_other(index, index->table[position], place.tag)) break;
    if (++position == index->entries) position = 0;
  }
  return position;
}

// The table position of `key`, or of the empty entry where its probe ends.
uint64_t probe(const tutti_index* index, const Key& key, const Place& place) {
  uint64_t position = place.home;
  for (uint64_t step = 0; step < index->entries; ++step) {
    const uint32_t entry = index->table[position];
    if (entry == kTuttiNoSlot) break;
    const bool has_tag = (entry & ~index->slot_mask) == place.tag;
    if (has_tag && key_of(index, entry & index->slot_mask) == key) break;
    if (++position == index->entries) position = 0;
  }
  return position;
}

// Finds the first candidates of up to kBlock keys, and prefetches these and their keys.
void prefetch_block(const tutti_index* index, const Key* block, uint64_t n, Place* places) {
  for (uint64_t i = 0; i < n; ++i) {
    places[i] = place_of(index, block[i]);
    __builtin_prefetch(&index->table[places[i].home]);
  }
  for (uint64_t i = 0; i < n; ++i) {
    places[i].home = candidate(index, places[i]);
    const uint32_t slot = slot_at(index, places[i].home);
    if (slot == kTuttiNoSlot) continue;
    __builtin_prefetch(&index->keys[2 * uint64_t{slot}]);
    __builtin_prefetch(&index->state[slot]);
  }
}

// Visits (i, slot of key i or kTuttiNoSlot) in order until visit returns false.
template <class Visit>
void look_up(const tutti_index* index, const uint8_t* keys, uint64_t n, Visit visit) {
  Key block[kBlock];
  Place places[kBlock];
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t count = n - begin < kBlock ? n - begin : kBlock;
    for (uint64_t i = 0; i < count; ++i) block[i] = load_key(keys, begin + i);
    prefetch_block(index, block, count, places);
    for (uint64_t i = 0; i < count; ++i) {
      const uint32_t slot = slot_at(index, probe(index, block[i], places[i]));
      if (!visit(begin + i, slot)) return;
    }
  }
}

// The table position that points at `slot`, or `entries`.
uint64_t position_of(const tutti_index* index, uint32_t slot) {
  const Place place = place_of(index, key_of(index, slot));
  uint64_t position = place.home;
  for (uint64_t step = 0; step < index->entries; ++step) {
    if (index->table[position] == (place.tag | slot)) return position;
    if (index->table[position] == kTuttiNoSlot) break;
    if (++position == index->entries) position = 0;
  }
  return index->entries;
}

// The cyclic distance from `from` to a position.
uint64_t distance(const tutti_index* index, uint64_t from, uint64_t position) {
  return position - from + (position < from ? index->entries : 0);
}

// Empties `hole`; moves back later entries of the cluster whose probes would stop at the hole.
void close_hole(tutti_index* index, uint64_t hole) {
  for (uint64_t ahead = hole + 1; ahead < index->entries; ++ahead) {
    const uint32_t slot = slot_at(index, ahead);
    if (slot == kTuttiNoSlot) break;
    __builtin_prefetch(&index->keys[2 * uint64_t{slot}]);
  }
  uint64_t position = hole;
  for (uint64_t step = 1; step < index->entries; ++step) {
    if (++position == index->entries) position = 0;
    const uint32_t slot = slot_at(index, position);
    if (slot == kTuttiNoSlot) break;
    const uint64_t home = place_of(index, key_of(index, slot)).home;
    if (distance(index, home, position) < distance(index, hole, position)) continue;
    index->table[hole] = index->table[position];
    hole = position;
  }
  index->table[hole] = kTuttiNoSlot;
}

bool is_slot(const tutti_index* index, int64_t slot) {
  return slot >= 0 && static_cast<uint64_t>(slot) < index->slots;
}

bool is_accepted(const tutti_index* index, uint32_t slot) {
  return slot != kTuttiNoSlot && index->state[slot] >= index->ready_min &&
         index->state[slot] <= index->ready_max;
}

int64_t wide(uint32_t slot) { return slot == kTuttiNoSlot ? kTuttiMissing : int64_t{slot}; }

constexpr uint64_t kFew = 32;  // so many rows are compared one by one, more are sorted

// Removes rows with repeated keys; keeps the first of each, in order.
uint64_t drop_repeated(const uint8_t* keys, int64_t* rows, uint64_t n) {
  uint64_t kept = 0;
  if (n <= kFew) {
    for (uint64_t i = 0; i < n; ++i) {
      const Key key = load_key(keys, static_cast<uint64_t>(rows[i]));
      bool is_new = true;
      for (uint64_t k = 0; k < kept && is_new; ++k) {
        is_new = !(load_key(keys, static_cast<uint64_t>(rows[k])) == key);
      }
      if (is_new) rows[kept++] = rows[i];
    }
    return kept;
  }
  const auto before = [keys](int64_t a, int64_t b) {
    const int order = std::memcmp(keys + a * static_cast<int64_t>(kTuttiKeyBytes),
                                  keys + b * static_cast<int64_t>(kTuttiKeyBytes), kTuttiKeyBytes);
    return order != 0 ? order < 0 : a < b;
  };
  std::sort(rows, rows + n, before);
  for (uint64_t i = 0; i < n; ++i) {
    const Key key = load_key(keys, static_cast<uint64_t>(rows[i]));
    const bool is_new = i == 0 || !(load_key(keys, static_cast<uint64_t>(rows[i - 1])) == key);
    if (is_new) rows[kept++] = rows[i];  // what lies before i is the last key kept, or a repetition
  }
  std::sort(rows, rows + kept);
  return kept;
}

// Slots of the longest prefix of keys in an accepted state.
uint64_t prefix(const tutti_index* index, const uint8_t* keys, uint64_t n, int64_t* slots_out) {
  uint64_t length = 0;
  look_up(index, keys, n, [=, &length](uint64_t i, uint32_t slot) {
    if (!is_accepted(index, slot)) return false;
    slots_out[i] = slot;
    length = i + 1;
    return true;
  });
  return length;
}

uint64_t number_of(const tutti_index* index, uint64_t slot) {
  return index->sequence[slot] & ~kTuttiDigestsBit;
}

// The cached digests of an object; null if they are not in the cache.
const uint64_t* cached_digests(const tutti_load_tables* tables, uint64_t slot) {
  const tutti_digests* cache = tables->digests;
  const uint64_t place = slot % cache->entries;
  const bool is_known = cache->slot[place] == static_cast<int64_t>(slot) &&
                        cache->sequence[place] == number_of(tables->index, slot);
  return is_known ? cache->digests + place * cache->layers : nullptr;
}

}  // namespace

uint64_t tutti_index_match(tutti_index* index, const uint8_t* keys, uint64_t n, uint32_t uses,
                           int64_t* slots_out) {
  const uint64_t length = prefix(index, keys, n, slots_out);
  for (uint64_t i = 0; i < length; ++i) index->access[slots_out[i]] = uses;
  return length;
}

uint64_t tutti_index_find(const tutti_index* index, const uint8_t* keys, uint64_t n,
                          int64_t* slots_out) {
  uint64_t found = 0;
  look_up(index, keys, n, [slots_out, &found](uint64_t i, uint32_t slot) {
    slots_out[i] = wide(slot);
    found += slot != kTuttiNoSlot ? 1 : 0;
    return true;
  });
  return found;
}

int64_t tutti_load_plan(const tutti_load_tables* tables, const uint8_t* keys, uint64_t n,
                        uint32_t uses, uint32_t verify, uint64_t* plan) {
  tutti_index* index = tables->index;
  auto* slots = reinterpret_cast<int64_t*>(plan);
  const uint64_t length = prefix(index, keys, n, slots);
  if (length != n) return -1 - static_cast<int64_t>(length);
  for (uint64_t i = 0; i < n; ++i) {
    if (++index->pins[slots[i]] != 0) continue;
    for (uint64_t k = 0; k <= i; ++k) --index->pins[slots[k]];
    return -1 - static_cast<int64_t>(i);
  }
  const uint64_t layers = tables->digests->layers;
  uint64_t* sequences = plan + n;
  uint64_t* digests = sequences + n;
  auto* marks = reinterpret_cast<uint8_t*>(digests + n * layers);
  int64_t runs = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const auto slot = static_cast<uint64_t>(slots[i]);
    const bool goes_on = i != 0 && slots[i] == slots[i - 1] + 1 && slot % tables->group_slots != 0;
    runs += goes_on ? 0 : 1;
    index->access[slot] = uses;
    if (index->hits != nullptr && index->hits[slot] != UINT16_MAX) ++index->hits[slot];
    sequences[i] = number_of(index, slot);
    const bool is_unproven = index->state[slot] != index->ready_min;
    const bool has_digests = (index->sequence[slot] & kTuttiDigestsBit) != 0;
    const bool is_wanted = has_digests && (verify != 0 || is_unproven);
    const uint64_t* known = is_wanted ? cached_digests(tables, slot) : nullptr;
    const bool is_known = known != nullptr;
    if (is_known) std::memcpy(digests + i * layers, known, 8 * layers);
    marks[i] =
        static_cast<uint8_t>((is_unproven ? kTuttiUnproven : 0) |
                             (has_digests ? kTuttiHasDigests : 0) | (is_known ? kTuttiKnown : 0));
    // A repeated slot counts once: the first time sets `used` to now.
    if (!is_unproven) tutti_reuse_loaded(tables->reuse, slots + i, 1, uses);
  }
  return runs;
}

int64_t tutti_index_unpin(tutti_index* index, const int64_t* slots, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    if (is_slot(index, slots[i]) && index->pins[slots[i]] != 0) {
      --index->pins[slots[i]];
      continue;
    }
    for (uint64_t k = 0; k < i; ++k) ++index->pins[slots[k]];
    return -1 - static_cast<int64_t>(i);
  }
  return static_cast<int64_t>(n);
}

uint64_t tutti_pins_take(uint16_t* kept, const int64_t* slots, uint64_t n, uint64_t room,
                         uint32_t last, uint64_t* fresh_out) {
  uint64_t fresh = 0;
  uint64_t taken = 0;
  for (; taken < n; ++taken) {
    uint16_t& mentions = kept[slots[last != 0 ? n - 1 - taken : taken]];
    if (mentions == UINT16_MAX) break;
    if (mentions == 0) {
      if (fresh == room) break;
      ++fresh;
    }
    ++mentions;
  }
  *fresh_out = fresh;
  return taken;
}

uint64_t tutti_pins_give_back(uint16_t* kept, const int64_t* slots, uint64_t n) {
  uint64_t freed = 0;
  for (uint64_t i = 0; i < n; ++i) freed += --kept[slots[i]] == 0 ? 1 : 0;
  return freed;
}

int64_t tutti_index_absent(tutti_index* index, const uint8_t* keys, uint64_t n, uint32_t uses,
                           int64_t* rows_out) {
  uint64_t absent = 0;
  look_up(index, keys, n, [=, &absent](uint64_t i, uint32_t slot) {
    if (slot == kTuttiNoSlot) {
      rows_out[absent++] = static_cast<int64_t>(i);
    } else {
      index->access[slot] = uses;
    }
    return true;
  });
  return static_cast<int64_t>(drop_repeated(keys, rows_out, absent));
}

int64_t tutti_index_insert(tutti_index* index, const tutti_insertion* insertion) {
  const tutti_insertion in = *insertion;
  const int64_t* slots = in.slots;
  const uint64_t n = in.n;
  // To find repeated slots, each row is stored in its slot's depth, which has no other use yet.
  for (uint64_t i = 0; i < n; ++i) {
    if (!is_slot(index, slots[i]) || index->state[slots[i]] > in.from_max) {
      return -1 - static_cast<int64_t>(i);
    }
    index->depth[slots[i]] = static_cast<uint32_t>(i);
  }
  for (uint64_t i = 0; i < n; ++i) {
    if (index->depth[slots[i]] != static_cast<uint32_t>(i)) return -1 - static_cast<int64_t>(i);
  }
  int64_t inserted = 0;
  Key block[kBlock];
  Place places[kBlock];
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t count = n - begin < kBlock ? n - begin : kBlock;
    for (uint64_t i = 0; i < count; ++i) block[i] = load_key(in.keys, begin + i);
    prefetch_block(index, block, count, places);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t position = probe(index, block[i], places[i]);
      const uint32_t existing = slot_at(index, position);
      const uint64_t row = begin + i;
      in.existing[row] = wide(existing);
      if (existing != kTuttiNoSlot) continue;
      const auto slot = static_cast<uint64_t>(slots[row]);
      index->keys[2 * slot] = block[i].low;
      index->keys[2 * slot + 1] = block[i].high;
      index->table[position] = places[i].tag | static_cast<uint32_t>(slot);
      index->state[slot] = static_cast<uint8_t>(in.state);
      index->sequence[slot] = in.sequence[row] | (in.has_digests[row] != 0 ? kTuttiDigestsBit : 0);
      index->depth[slot] = in.depth[row];
      index->access[slot] = in.access != nullptr ? in.access[row] : in.uses;
      ++inserted;
    }
  }
  return inserted;
}

int64_t tutti_index_move(tutti_index* index, const int64_t* slots, uint64_t n, uint32_t from,
                         uint32_t state, uint32_t unpinned) {
  for (uint64_t i = 0; i < n; ++i) {
    if (!is_slot(index, slots[i]) || (from >> index->state[slots[i]] & 1) == 0 ||
        (unpinned != 0 && index->pins[slots[i]] != 0)) {
      return -1 - static_cast<int64_t>(i);
    }
  }
  for (uint64_t i = 0; i < n; ++i) index->state[slots[i]] = static_cast<uint8_t>(state);
  return static_cast<int64_t>(n);
}

uint64_t tutti_index_remove(tutti_index* index, const int64_t* slots, uint64_t n) {
  uint64_t removed = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t position = position_of(index, static_cast<uint32_t>(slots[i]));
    if (position == index->entries) continue;
    close_hole(index, position);
    index->keys[2 * static_cast<uint64_t>(slots[i])] = 0;
    index->keys[2 * static_cast<uint64_t>(slots[i]) + 1] = 0;
    ++removed;
  }
  return removed;
}

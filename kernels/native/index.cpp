// An open-addressing hash table over arrays that the caller owns: linear probing, removal by
// shifting the following entries back, so that there are no tombstones and probes stay short.
//
// Look-ups go in blocks: first every table entry of the block is prefetched, then every key that
// those entries point at, then the keys are compared; the cache misses of a block overlap.
#include <cstdint>
#include <cstring>

#include "api.h"

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

// Where the probe for a key begins. Both words meet the seed before they are multiplied.
uint64_t home_of(const tutti_index* index, const Key& key) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ULL;  // 2^64 over the golden ratio, odd.
  const uint64_t a = key.low ^ index->seed;
  const uint64_t b = key.high ^ (index->seed * golden + golden);
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  const uint64_t mixed = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  return (mixed ^ (mixed >> 32)) & index->mask;
}

// The table position of `key`, or of the empty entry where its probe ends. The table is at most
// half full, so an empty entry exists; the step bound holds even if it were damaged.
uint64_t probe(const tutti_index* index, const Key& key, uint64_t home) {
  uint64_t position = home;
  for (uint64_t step = 0; step <= index->mask; ++step) {
    const uint32_t slot = index->table[position];
    if (slot == kTuttiNoSlot || key_of(index, slot) == key) return position;
    position = (position + 1) & index->mask;
  }
  return home;
}

// The homes of up to kBlock keys, their table lines and first keys on the way into the cache.
void prefetch_block(const tutti_index* index, const Key* block, uint64_t n, uint64_t* homes) {
  for (uint64_t i = 0; i < n; ++i) {
    homes[i] = home_of(index, block[i]);
    __builtin_prefetch(&index->table[homes[i]]);
  }
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t slot = index->table[homes[i]];
    if (slot == kTuttiNoSlot) continue;
    __builtin_prefetch(&index->keys[2 * uint64_t{slot}]);
    __builtin_prefetch(&index->state[slot]);
  }
}

// Visits (i, slot of key i or kTuttiNoSlot) in order until visit returns false.
template <class Visit>
void look_up(const tutti_index* index, const uint8_t* keys, uint64_t n, Visit visit) {
  Key block[kBlock];
  uint64_t homes[kBlock];
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t count = n - begin < kBlock ? n - begin : kBlock;
    for (uint64_t i = 0; i < count; ++i) block[i] = load_key(keys, begin + i);
    prefetch_block(index, block, count, homes);
    for (uint64_t i = 0; i < count; ++i) {
      const uint32_t slot = index->table[probe(index, block[i], homes[i])];
      if (!visit(begin + i, slot)) return;
    }
  }
}

// The table position that points at `slot`, or mask + 1.
uint64_t position_of(const tutti_index* index, uint32_t slot) {
  uint64_t position = home_of(index, key_of(index, slot));
  for (uint64_t step = 0; step <= index->mask; ++step) {
    if (index->table[position] == slot) return position;
    if (index->table[position] == kTuttiNoSlot) break;
    position = (position + 1) & index->mask;
  }
  return index->mask + 1;
}

// Empties `hole` and moves back each later entry of the cluster whose probe would pass the hole.
void close_hole(tutti_index* index, uint64_t hole) {
  uint64_t position = hole;
  for (uint64_t step = 0; step < index->mask; ++step) {
    position = (position + 1) & index->mask;
    const uint32_t slot = index->table[position];
    if (slot == kTuttiNoSlot) break;
    const uint64_t from_home = (position - home_of(index, key_of(index, slot))) & index->mask;
    const uint64_t from_hole = (position - hole) & index->mask;
    if (from_home < from_hole) continue;
    index->table[hole] = slot;
    hole = position;
  }
  index->table[hole] = kTuttiNoSlot;
}

}  // namespace

uint64_t tutti_index_match(const tutti_index* index, const uint8_t* keys, uint64_t n,
                           uint32_t* slots_out) {
  uint64_t length = 0;
  look_up(index, keys, n, [index, slots_out, &length](uint64_t i, uint32_t slot) {
    if (slot == kTuttiNoSlot) return false;
    const uint32_t state = index->state[slot];
    if (state < index->ready_min || state > index->ready_max) return false;
    slots_out[i] = slot;
    length = i + 1;
    return true;
  });
  return length;
}

uint64_t tutti_index_find(const tutti_index* index, const uint8_t* keys, uint64_t n,
                          uint32_t* slots_out) {
  uint64_t found = 0;
  look_up(index, keys, n, [slots_out, &found](uint64_t i, uint32_t slot) {
    slots_out[i] = slot;
    found += slot != kTuttiNoSlot ? 1 : 0;
    return true;
  });
  return found;
}

uint64_t tutti_index_insert(tutti_index* index, const uint8_t* keys, const uint32_t* slots,
                            uint64_t n, uint32_t* existing_out) {
  uint64_t inserted = 0;
  Key block[kBlock];
  uint64_t homes[kBlock];
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t count = n - begin < kBlock ? n - begin : kBlock;
    for (uint64_t i = 0; i < count; ++i) block[i] = load_key(keys, begin + i);
    prefetch_block(index, block, count, homes);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t position = probe(index, block[i], homes[i]);
      const uint32_t existing = index->table[position];
      existing_out[begin + i] = existing;
      if (existing != kTuttiNoSlot) continue;
      const uint32_t slot = slots[begin + i];
      index->keys[2 * uint64_t{slot}] = block[i].low;
      index->keys[2 * uint64_t{slot} + 1] = block[i].high;
      index->table[position] = slot;
      ++inserted;
    }
  }
  return inserted;
}

uint64_t tutti_index_remove(tutti_index* index, const uint32_t* slots, uint64_t n) {
  uint64_t removed = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t position = position_of(index, slots[i]);
    if (position > index->mask) continue;
    close_hole(index, position);
    index->keys[2 * uint64_t{slots[i]}] = 0;
    index->keys[2 * uint64_t{slots[i]} + 1] = 0;
    ++removed;
  }
  return removed;
}

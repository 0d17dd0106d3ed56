// The free slots of a pool; see tutti/placement/allocator.py, which owns the memory.
#pragma once

#include "api.h"

// free: by slot, 1 if it is free. longest: by group, its longest free run. Groups with free slots
// are in FIFO lists: `members` lists of wholly free groups, one per member, and then one list per
// length of the longest run below group_slots. next and previous are by group, first and last by
// list; kTuttiNoSlot ends a list.
struct tutti_allocator {
  uint8_t* free;
  uint32_t* longest;
  uint32_t* next;
  uint32_t* previous;
  uint32_t* first;
  uint32_t* last;
  uint64_t members;
  uint64_t groups_per_member;
  uint64_t group_slots;
  uint64_t free_slots;
  uint64_t cursor;  // the member whose groups are next
};

// Rebuilds all lists from `free`, with groups in ascending order.
TUTTI_API void tutti_allocator_rebuild(tutti_allocator* allocator);

// Allocates up to n slots in page order, after slot `after` unless that is kTuttiMissing; returns
// their number.
TUTTI_API uint64_t tutti_allocator_allocate(tutti_allocator* allocator, uint64_t n, int64_t after,
                                            int64_t* slots_out);

// Frees ascending slots. Returns -1 - i and changes nothing if slot i is out of order, does not
// exist or is free.
TUTTI_API int64_t tutti_allocator_free(tutti_allocator* allocator, const int64_t* slots,
                                       uint64_t n);

// The tables that a put uses.
struct tutti_put_tables {
  tutti_index* index;
  tutti_reuse* reuse;
  tutti_allocator* allocator;
};

// Keys of a put that need slots; the arrays have n rows.
struct tutti_placement {
  const uint8_t* keys;
  const uint8_t* parents;
  const uint32_t* depths;
  uint64_t n;
  uint64_t sequence;  // of the first
  uint32_t uses;
  uint32_t has_digests;
};

// Allocates slots for keys, as long as there are free ones. Maps the keys that the index does not
// have, with the state of slots being written, and updates the history. out: slots i64[n], sequence
// numbers u64[n] and rows i64[n] of the mapped keys; 2n words of scratch; then the number of keys
// that got a slot, the number of mapped keys, and the number of mapped keys that had been evicted.
// Returns -1 if the index uses a slot that is free.
TUTTI_API int64_t tutti_put_place(const tutti_put_tables* tables, const tutti_placement* placement,
                                  uint64_t* out);

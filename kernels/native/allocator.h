// The free slots of a pool; see tutti/placement/allocator.py, which owns the memory.
#pragma once

#include "api.h"

// free: by slot, 1 for a free one. longest: by group, its longest free run. Whole groups of each
// member, and partly used ones by their longest run, are in lists, first come, first served:
// `members` lists, then one for each length below group_slots. next and previous are by group,
// first and last by list; kTuttiNoSlot ends a list.
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

// Files every group anew, in ascending order: after `free` was written.
TUTTI_API void tutti_allocator_rebuild(tutti_allocator* allocator);

// Up to n slots in page order, behind slot `after` if that is not kTuttiMissing; returns how many.
TUTTI_API uint64_t tutti_allocator_allocate(tutti_allocator* allocator, uint64_t n, int64_t after,
                                            int64_t* slots_out);

// Frees ascending slots. -1 - i, and nothing changes, where slot i does not ascend, does not exist
// or is free.
TUTTI_API int64_t tutti_allocator_free(tutti_allocator* allocator, const int64_t* slots,
                                       uint64_t n);

// What a put looks at.
struct tutti_put_tables {
  tutti_index* index;
  tutti_reuse* reuse;
  tutti_allocator* allocator;
};

// Keys of a put that want slots; the arrays have n rows.
struct tutti_placement {
  const uint8_t* keys;
  const uint8_t* parents;
  const uint32_t* depths;
  uint64_t n;
  uint64_t sequence;  // of the first
  uint32_t uses;
  uint32_t has_digests;
};

// Gives slots to keys as far as there are some, maps those that the index does not have, which
// are being written then, and tells the history. out: slots i64[n], sequence numbers u64[n], and
// rows i64[n] of the keys that were mapped; 2n words of scratch; then how many keys got a slot, how
// many of them were mapped, and how many of those had been evicted. -1 where a free slot is in use
// by the index.
TUTTI_API int64_t tutti_put_place(const tutti_put_tables* tables, const tutti_placement* placement,
                                  uint64_t* out);

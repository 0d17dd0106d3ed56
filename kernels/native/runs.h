// Splits runs of slices into the commands of a job, and copies the numbers of its pages.
#pragma once

#include "api.h"
#include "gio_uring/iocb.h"

namespace gio {

// Limits of commands; mirrored by tutti/gio_uring/iocb.py.
struct Cut {
  u32 slice_nlb;
  u32 lba_nbytes;
  u32 command_nlb_max;
  u32 command_slices_max;
};

// The locations of a pool's slots, see tutti/medium/geometry.py, which mirrors this struct.
struct SlotPlaces {
  u64 nsids;  // u32[members]
  u64 members;
  u64 member_slots;
  u64 group_slots;
  u64 layers;
  u64 first_lba;
};

}  // namespace gio

// Splits n runs of count[i] consecutive slices into commands, in the same order. A slice longer
// than a command is split at blocks; otherwise commands have whole slices. Writes the first out_max
// commands; returns the number of all, or -EINVAL if a limit in the cut is 0.
TUTTI_API int64_t gio_split_runs(const uint64_t* slba, const uint32_t* nsid, const int64_t* count,
                                 uint64_t n, const gio::Cut* cut, gio::Run* out, uint64_t out_max);
// The same for slots in page order, which it combines to runs. -ERANGE for a slot that does not
// exist.
TUTTI_API int64_t gio_slot_runs(const int64_t* slots, uint64_t n, const gio::SlotPlaces* places,
                                const gio::Cut* cut, gio::Run* out, uint64_t out_max);
// Copies n page numbers of 4 or 8 bytes, little-endian; -ERANGE if one is negative or not below
// `most`, else whether each is above the one before.
TUTTI_API int64_t gio_copy_pages(const uint8_t* pages, uint32_t nbytes, uint64_t n, uint64_t most,
                                 uint32_t* out);

// Runs of slices cut into commands: what a job names, from where its slices lie.
#pragma once

#include "api.h"
#include "gio_uring/iocb.h"

namespace gio {

// How commands are cut; mirrored by tutti/gio_uring/iocb.py.
struct Cut {
  u32 slice_nlb;
  u32 lba_nbytes;
  u32 command_nlb_max;
  u32 command_slices_max;
};

// Where the slots of a pool lie, see tutti/medium/geometry.py; mirrored by it.
struct SlotPlaces {
  u64 nsids;  // u32[members]
  u64 members;
  u64 member_slots;
  u64 group_slots;
  u64 layers;
  u64 first_lba;
};

}  // namespace gio

// Cuts n runs of count[i] consecutive slices into commands, in the same order: a slice longer than
// a command is split at blocks, else commands hold whole slices. Writes the first out_max of them;
// returns how many there are, or -EINVAL for a cut of zeros.
TUTTI_API int64_t gio_split_runs(const uint64_t* slba, const uint32_t* nsid, const int64_t* count,
                                 uint64_t n, const gio::Cut* cut, gio::Run* out, uint64_t out_max);
// The same for the runs that slots in page order make. -ERANGE for a slot that does not exist.
TUTTI_API int64_t gio_slot_runs(const int64_t* slots, uint64_t n, const gio::SlotPlaces* places,
                                const gio::Cut* cut, gio::Run* out, uint64_t out_max);

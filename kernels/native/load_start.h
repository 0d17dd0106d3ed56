// A load in one call: what it needs of the index, its commands, and its submission.
#pragma once

#include "engine.h"
#include "runs.h"

// What all transfers of one pool have in common, and one of them; mirrored by
// tutti/transfers/load_start.py.
struct tutti_start {
  gio::Engine* engine;
  const gio::SlotPlaces* places;
  uint64_t padding;  // see gio::Iocb
  uint64_t timeout_ns;
  uint32_t slice_nlb;
  uint32_t layer_stride_nlb;
  uint32_t lba_shift;
  uint32_t psdt;
  uint32_t command_nlb_max;
  uint32_t descriptors_max;  // of a command
  uint64_t slot_runs_max;    // commands of one slot and layer
  // Of this one.
  const gio::Iocb* memory;  // bases and segments; 0: nothing is submitted
  const uint32_t* pages;
  uint64_t tag;
  uint64_t held;
  gio::Job** job;  // out: what was submitted; stays 0 else
};

// As tutti_load_plan; then submits the load as one job if it can be one: no object is unproven, and
// all digests that are wanted are known, or none is. The plan goes on with status u32[n] and the
// job's runs, slot_runs_max for each key, in words of 8 bytes. Below kTuttiStartFailed: that minus
// an errno of the submission, and nothing is pinned.
constexpr int64_t kTuttiStartFailed = -(int64_t{1} << 32);
TUTTI_API int64_t tutti_load_start(const tutti_load_tables* tables, const uint8_t* keys, uint64_t n,
                                   uint32_t uses, uint32_t verify, uint64_t* plan,
                                   const tutti_start* start);

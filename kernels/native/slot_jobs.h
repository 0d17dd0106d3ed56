// Jobs that move the contents of slots: one call computes and submits the commands.
#pragma once

#include "allocator.h"
#include "engine.h"
#include "runs.h"

// The common fields of all jobs on the same places, and the fields of one job; mirrored by
// tutti/pool/slot_jobs.py.
struct tutti_slot_job {
  gio::Engine* engine;
  const gio::SlotPlaces* places;
  uint64_t scratch;  // see gio::Iocb::padding: of reads
  uint64_t zeros;    // of writes
  uint32_t slice_nlb;
  uint32_t layer_stride_nlb;
  uint32_t lba_shift;
  uint32_t psdt;
  uint32_t command_nlb_max;
  uint32_t descriptors_max;  // of a command
  uint64_t slot_runs_max;    // commands of one slot and layer
  // Per job:
  const gio::Iocb* memory;  // bases and segments
  const uint32_t* pages;    // of each slot
  uint64_t* digests;        // see gio::JobConfig; or 0
  gio::Job** job;           // out: what was submitted
  uint64_t tag;
  uint64_t timeout_ns;
  uint32_t opcode;
  uint32_t flags;
  uint32_t priority;
  uint32_t digest;
  uint32_t held;
  uint32_t ahead;
};

// Submits a job on slots in page order. It uses the words until its release: n / 2 + 1 with the
// status u32[n], then 3 per slot and command of it. Returns 0, an error of gio_engine_submit, or
// -EINVAL or -ERANGE for slots that do not exist.
TUTTI_API int tutti_slot_job_start(const tutti_slot_job* job, const int64_t* slots, uint64_t n,
                                   uint64_t* words);

// A load; packed by tutti/placement/load_plan.py.
struct tutti_load {
  uint64_t n;  // keys
  uint64_t uses;
  uint64_t verify;
  uint64_t once;  // 1: refuses pages that do not ascend
  uint64_t held;
  uint64_t ahead;
  const gio::Iocb* memory;
  uint64_t tag;
  gio::Job** job;       // out
  uint64_t page_bytes;  // of a page's number
};
static_assert(sizeof(tutti_load) == 10 * sizeof(uint64_t), "layout shared with Python");

// As tutti_load_plan. Then submits the load if one job can move it: no object is unproven, and
// either all needed digests are known or none is needed. common: fields of all jobs; 0: submits
// nothing. pages: numbers below memory->n_pages. The plan is followed by n + 1 words and 3 for each
// slot and command of it, for the job's, and n + 1 for the pages. A result below kTuttiNotStarted
// is kTuttiNotStarted minus an errno of the submission, or kTuttiBadPages if a page is not in the
// memory, or pages may repeat; nothing is pinned then.
constexpr int64_t kTuttiNotStarted = -(int64_t{1} << 32);
constexpr int64_t kTuttiBadPages = -(int64_t{1} << 33);
TUTTI_API int64_t tutti_load_start(const tutti_load_tables* tables, const tutti_slot_job* common,
                                   const uint8_t* keys, const uint8_t* pages,
                                   const tutti_load* load, uint64_t* plan);

// The common fields of a pool's puts; mirrored by tutti/pool/slot_jobs.py.
struct tutti_put {
  tutti_put_tables tables;
  tutti_digests* cache;
  tutti_slot_job data;
  tutti_slot_job records;                 // memory 0: the caller writes them
  const tutti_record_identity* identity;  // of any member
  uint8_t* staging;                       // of records
  uint64_t member_slots;
  uint64_t layers;
};

// A put, as words that tutti/transfers/quick_put.py fills.
struct tutti_put_batch {
  uint64_t n;         // keys
  uint64_t sequence;  // of the first
  uint64_t uses;
  uint64_t access_64s;
  uint64_t first_page;  // of the staging
  const gio::Iocb* memory;
  uint64_t descriptors_max;  // of a command
  gio::Job** job;            // out
  uint64_t tag;
  uint64_t held;
};
static_assert(sizeof(tutti_put_batch) == 10 * sizeof(uint64_t), "layout shared with Python");

// Packs a chain of n keys, which follow `parent` (0: none) and of which the first has this depth,
// with a page of `page_bytes` bytes for each: parents, keys, depths u32 and pages u32, one after
// another, 40 bytes per key. -ERANGE for a page that is not below `most`.
TUTTI_API int tutti_put_pack(const uint8_t* keys, uint64_t n, const uint8_t* parent, uint32_t depth,
                             const uint8_t* pages, uint32_t page_bytes, uint64_t most,
                             uint8_t* out);

// Starts a put of keys that are all absent and for which there is room: takes slots, updates index
// and history, and submits the data job, followed by the records' job if all slots are on one
// member. Returns 1 plus the number of keys that had been evicted; 0, with nothing changed, for any
// other put; or an error of gio_engine_submit, with the slots taken. words: slots i64[n], sequence
// numbers u64[n], digests u64[n][layers], n / 2 + 1 words with the status u32[n] of the data, as
// many with that of the records, whether the records follow the data, and scratch; in all 24 words,
// layers + 11 per key, and 3 per command of its slot and of its record. packed: by tutti_put_pack.
// Both are kept until the release.
TUTTI_API int tutti_put_start(const tutti_put* put, const tutti_put_batch* batch,
                              const uint8_t* packed, uint64_t* words);

// Called after the job's release. If data and records were written, moves the slots to ready,
// caches the digests, and returns 0; otherwise changes nothing and returns 1.
TUTTI_API int tutti_put_end(const tutti_put* put, uint64_t n, const uint64_t* words);

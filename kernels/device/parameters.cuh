// Parameters of the kernels in kernels.cu: plain data that the host fills once per batch, for all
// layers.  Mirrored by tutti/gio_uring/gpu/parameters.py; a test compares the layouts.
//
// Entry points, all `extern "C" __global__ void`.  Of each pair, _word rings a doorbell in pinned
// memory (a software controller), _mmio one in a mapped BAR page (a drive):
//
//   gio_submit_word, gio_submit_mmio     (const Batch*, u32 layer)
//       <<<n_shares, 32>>>  submits the layer's commands, as many as there are CIDs for, and ends.
//       May run one layer ahead, before the drain of the layer before, if each share has a queue
//       of its own; it then submits nothing unless that layer was submitted in full.
//   gio_drain_word, gio_drain_mmio       (const Batch*, u32 layer, u32 publish)
//       <<<n_shares, 32>>>  submits the rest, and polls until every command ended or the deadline.
//   gio_resident_word, gio_resident_mmio (const Batch*, u32 layer, u32 publish)
//       <<<n_shares, 32 to 256>>>  does both, and moves slices: those of reads to their pages as
//       commands end, those of writes to staging before their commands are submitted.
//   gio_move                             (const Batch*, u32 layer, u32 publish)
//       <<<any, 32 to 256>>>  staging -> pages for reads, pages -> staging for writes; also
//       computes or compares digests if the batch has them.
//   gio_verify                           (const Batch*, u32 layer, u32 publish)
//       <<<any, 32 to 256>>>  digests of slices in place: compares those of reads, computes those
//       of writes.
//   gio_persistent_word, gio_persistent_mmio (const Mailbox*)
//       <<<n_shares, 32 to 256>>>  gio_resident for every post of the mailbox, until told to stop.
//
// Blocks have whole warps.  A layer is one of these sequences on one stream:
//
//   read, directly         [submit] drain [verify]       read, staged       [submit] drain move
//   write, directly        [verify] submit drain         write, staged      move submit drain
//   either                 resident                      staged by the host's engine   move
//
// The last kernel of a layer is launched with publish = 1: its last block stores the first error of
// the layer to `flags[layer].status` and releases `flags[layer].ready`.  A missed deadline is an
// error like any other: every wait is bounded, and waiters on the flag are released.
//
// After its deadline a command keeps its CID, and the device may still write to its memory.
// `tallies[layer].owned` counts such commands; if it is not 0, memory and CIDs become free only by
// a reset of the controller.  A block with a late command submits nothing in later layers, and
// fails them at once.
#pragma once

#include "gio_uring/iocb.h"
#include "gio_uring/layer_words.h"
#include "gio_uring/queue_pair.h"

namespace gio {

constexpr u32 kBlockThreadsMax = 256;  // where an entry point says "32 to 256"

// One block's part of every layer.
struct QueueShare {
  u64 qp;           // QueuePair; its own words, marks, cid_free and completions in device memory
  u64 lists;        // list_nbytes of list memory for each CID, as the kernel addresses it
  u64 lists_dma;    // the same memory as the controller addresses it
  u32 list_nbytes;  // at most 4096 where a list may not cross a page
  u32 first_run;    // runs first_run to first_run + n_runs - 1 of the IOCB; the pieces of a slice
  u32 n_runs;       // that is longer than a command belong to one share
  u32 lost;         // not 0: a deadline passed, and the block sends nothing more.  Its own word
};
static_assert(sizeof(QueueShare) == 40, "layout shared with Python");

constexpr u32 kRunPending = 0xffffffffu;

// State of one run's command.  All bits set (the host's initial value): not submitted.
struct RunState {
  u32 cid;     // kNoCid, or the CID that it holds
  u32 status;  // kRunPending, or the command's Status; kTimedOut is final, also when the CQE comes
};
static_assert(sizeof(RunState) == 8, "layout shared with Python");

// Sums over the blocks of a layer, in device memory.  Zeroed by the host.
struct LayerTally {
  u32 arrived;  // blocks of the publishing kernel that have finished; 0 again afterwards
  u32 status;   // the first error, or 0
  u32 owned;    // commands that missed the deadline and still hold their CIDs
  u32 reserved;
};
static_assert(sizeof(LayerTally) == 16, "layout shared with Python");

// Locations of slices, in the kernels' addresses.  The slice of pages[i] in layer l is staged at
// staged_bases[l] + i * staged_stride, its segments one after another.
struct SliceTable {
  u64 paged;         // Iocb of the pages: pages, bases, segments, opcode, slice_nlb and lba_shift
  u64 staged_bases;  // u64[n_layers], or 0: commands name the pages themselves
  u64 staged_stride;
  u64 digests;      // u64[n_pages][n_layers], or 0.  Reads are compared, writes computed
  u64 page_status;  // u32[n_pages] in device memory, zeroed by the host; a page's first error
};
static_assert(sizeof(SliceTable) == 40, "layout shared with Python");

struct Batch {
  u64 iocb;        // Iocb as the controller addresses memory
  u64 shares;      // QueueShare[n_shares]
  u64 states;      // RunState[n_layers][n_runs], every byte 0xff at first
  u64 slices;      // SliceTable
  u64 flags;       // LayerWord[n_layers], zeroed; pinned or device memory
  u64 tallies;     // LayerTally[n_layers]
  u64 timeout_ns;  // how long a kernel waits, counted from when its block began
  u32 n_shares;
  u32 ready;  // what flags[layer].ready is set to; not 0
};
static_assert(sizeof(Batch) == 64, "layout shared with Python");

// One layer for the persistent kernel.
struct Post {
  u64 batch;  // Batch
  u32 layer;
  u32 publish;
};
static_assert(sizeof(Post) == 16, "layout shared with Python");

// Mailbox of the persistent kernel: words in pinned memory, each with one writer.  The host writes
// `stop`, and block b writes consumed[b].  `posted` is written by the stream that copied the tables
// of the new posts to the device, after that copy.
struct Mailbox {
  u64 posts;            // Post[capacity]; post n lies at n % capacity
  u64 posted;           // u32*: how many posts there are, released after the post was written
  u64 stop;             // u32*: not 0 ends the kernel before its next post
  u64 consumed;         // u32[n_shares]: posts that block b is done with; the slowest frees a place
  u64 idle_timeout_ns;  // a kernel without a new post for so long ends by itself
  u32 capacity;         // a power of two
  u32 reserved;
};
static_assert(sizeof(Mailbox) == 48, "layout shared with Python");

}  // namespace gio

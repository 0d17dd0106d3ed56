// I/O control block: what to move, prepared once for all layers.  NVMe commands are computed from
// it.
//
// A run is one command per layer.  From layer to layer only the LBA (by a constant stride) and
// the memory base addresses change, so the same runs serve every layer.
//
//   lba    = run.slba + layer * layer_stride_nlb
//   memory = bases[layer * segments + k] + pages[i] * segment_stride[k]
//
// On the medium a slice has slice_nlb blocks: the segments of one page, one after another, and
// padding.  A run covers nlb blocks, from byte `skip` of the slice of pages[first] on.
#pragma once

#include "gio_uring/sgl.h"

namespace gio {

constexpr u32 kSegmentsMax = 4;

struct Run {
  u64 slba;  // of layer 0
  u32 nsid;
  u32 nlb;    // at most MDTS
  u32 first;  // index into pages
  u32 skip;   // bytes into the first slice, a multiple of the LBA size
};
static_assert(sizeof(Run) == 24, "layout shared with Python");

struct Iocb {
  u64 runs;     // Run[n_runs]
  u64 pages;    // u32[n_pages]
  u64 bases;    // u64[n_layers * n_segments]
  u64 padding;  // scratch memory on reads, zeros on writes: at least one LBA, or 0 if unpadded
  u64 segment_stride[kSegmentsMax];  // bytes from one page to the next
  u32 segment_nbytes[kSegmentsMax];
  u32 n_runs;
  u32 n_pages;
  u32 n_layers;
  u32 n_segments;
  u32 opcode;  // Opcode; kFlush and kDatasetManagement use runs without pages
  u32 flags;   // kFua
  u32 slice_nlb;
  u32 layer_stride_nlb;
  u32 lba_shift;
  u32 psdt;  // Psdt
};
static_assert(sizeof(Iocb) == 120, "layout shared with Python");

// Number of slices that a run covers at least in part.
GIO_HD u32 run_slices(const Iocb& io, const Run& run) {
  const u32 blocks = (run.skip >> io.lba_shift) + run.nlb;
  return (blocks + io.slice_nlb - 1) / io.slice_nlb;
}

template <typename Builder>
GIO_HD u32 iocb_add_extents(const Iocb& io, const Run& run, u32 layer, Builder* builder) {
  const u64* bases = at<u64>(io.bases) + static_cast<u64>(layer) * io.n_segments;
  const u32* pages = at<u32>(io.pages);
  const u32 slice_nbytes = io.slice_nlb << io.lba_shift;
  u32 left = run.nlb << io.lba_shift;
  u32 index = run.first;
  u32 position = run.skip;
  while (left != 0) {  // bounded: every slice takes at least one LBA of what is left
    if (index >= io.n_pages) return kInvalidField;
    const u64 page = pages[index];
    u32 start = 0;
    for (u32 k = 0; k <= io.n_segments && left != 0; ++k) {
      const bool is_padding = k == io.n_segments;
      const u32 end = is_padding ? slice_nbytes : start + io.segment_nbytes[k];
      if (position < end) {
        u32 nbytes = end - position;
        if (nbytes > left) nbytes = left;
        const u64 address =
            is_padding ? io.padding : bases[k] + page * io.segment_stride[k] + (position - start);
        const u32 status = builder->add(address, nbytes);
        if (status != kOk) return status;
        position += nbytes;
        left -= nbytes;
      }
      start = end;
    }
    position = 0;
    ++index;
  }
  return kOk;
}

// Builds the read or write command of one run and layer into all 16 dwords of `sqe`.
GIO_HD u32 iocb_build(const Iocb& io, const Run& run, u32 layer, u32 cid, const ListMemory& list,
                      Sqe* sqe) {
  const u64 slba = run.slba + static_cast<u64>(layer) * io.layer_stride_nlb;
  Sqe command = {};
  command.cdw0 = make_cdw0(io.opcode, io.opcode == kFlush ? kPsdtPrp : io.psdt, cid);
  command.nsid = run.nsid;
  u32 status = kOk;
  if (io.opcode == kDatasetManagement) {
    if (list.nbytes < sizeof(DsmRange)) return kInvalidSglCount;
    DsmRange* range = at<DsmRange>(list.address);
    range->attributes = 0;
    range->nlb = run.nlb;
    range->slba = slba;
    command.cdw11 = kDsmDeallocate;  // cdw10: number of ranges, 0-based
    command.cdw0 = make_cdw0(io.opcode, kPsdtPrp, cid);
    command.dptr[0] = list.dma;
  } else if (io.opcode != kFlush) {
    if (run.nlb == 0 || run.nlb > kNlbMax) return kInvalidField;
    command.cdw10 = static_cast<u32>(slba);
    command.cdw11 = static_cast<u32>(slba >> 32);
    command.cdw12 = (run.nlb - 1) | io.flags;
    if (io.psdt == kPsdtSgl) {
      SglBuilder builder(list);
      status = iocb_add_extents(io, run, layer, &builder);
      if (status == kOk) status = builder.finish(&command);
    } else {
      PrpBuilder builder(list);
      status = iocb_add_extents(io, run, layer, &builder);
      if (status == kOk) status = builder.finish(&command);
    }
  }
  *sqe = command;
  return status;
}

}  // namespace gio

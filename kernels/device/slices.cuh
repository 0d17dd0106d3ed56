// Moves the slices of a layer by the warps of one block or of a grid, with digests by digest.cuh.
#pragma once

#include "digest.cuh"
#include "submit.cuh"

namespace gio {

// Slices that are only copied are split into pieces of this size, so that a few long slices keep
// all warps busy.
constexpr u32 kPieceNbytes = 16384;

// One layer's slices.
struct SliceWork {
  const SliceTable* table;
  const Iocb* paged;
  u64 staging;  // where slice 0 is staged, or 0
  LayerTally* tally;
  u32 layer;
  u32 nbytes;  // of a slice, without padding

  GIO_HD SliceWork(const Batch* batch, u32 l)
      : table(at<SliceTable>(batch->slices)),
        paged(at<Iocb>(table->paged)),
        staging(table->staged_bases != 0 ? at<u64>(table->staged_bases)[l] : 0),
        tally(at<LayerTally>(batch->tallies) + l),
        layer(l),
        nbytes(0) {
    for (u32 k = 0; k < paged->n_segments; ++k) nbytes += paged->segment_nbytes[k];
  }

  GIO_HD bool is_staged() const { return staging != 0; }
  GIO_HD bool has_digests() const { return table->digests != 0; }
  GIO_HD bool reads() const { return paged->opcode == kRead; }
  GIO_HD Way way() const {
    return !is_staged() ? Way::kInPlace : reads() ? Way::kToPages : Way::kToStaging;
  }
  GIO_HD u64 staged(u32 index) const {
    return is_staged() ? staging + index * table->staged_stride : 0;
  }
  // Number of pieces of a slice; one if it has a digest.
  GIO_HD u32 pieces() const {
    return has_digests() ? 1 : (nbytes + kPieceNbytes - 1) / kPieceNbytes;
  }
  // Whether an earlier step failed the page.  Slices of writes are moved anyway, because their
  // commands write the content of staging in any case.
  GIO_HD bool is_lost(u32 index) const {
    return reads() && own_load(&at<u32>(table->page_status)[index]) != 0;
  }
};

GIO_HD void lose_page(const SliceWork& work, u32 index, u32 status) {
  set_if_zero(&at<u32>(work.table->page_status)[index], status);
}

// One lane compares the digest of a read slice, or stores that of a written one.
GIO_HD void settle_digest(const SliceWork& work, u32 index, u64 digest) {
  const u64 place = static_cast<u64>(index) * work.paged->n_layers + work.layer;
  u64* kept = &at<u64>(work.table->digests)[place];
  if (lane_index() != 0 || digest_settles(kept, digest, work.reads())) return;
  note_error(work.tally, kDigestMismatch);
  lose_page(work, index, kDigestMismatch);
}

// Copies bytes `from` to `to` of a slice between its page and staging.
GIO_HD void warp_move(const SliceWork& work, u32 index, u32 from, u32 to) {
  const Iocb& io = *work.paged;
  const u64 page = at<u32>(io.pages)[index];
  const u64* bases = at<u64>(io.bases) + static_cast<u64>(work.layer) * io.n_segments;
  const u64 staged = work.staged(index);
  u32 start = 0;
  for (u32 k = 0; k < io.n_segments; ++k) {
    const u32 end = start + io.segment_nbytes[k];
    const u32 first = from > start ? from : start;
    const u32 last = to < end ? to : end;
    if (first < last) {
      const u64 paged = bases[k] + page * io.segment_stride[k] + (first - start);
      const bool reads = work.reads();
      warp_copy(reads ? paged : staged + first, reads ? staged + first : paged, last - first);
    }
    start = end;
  }
}

// The part of a slice that one warp handles.
struct Part {
  u32 index;     // of the slice
  u32 from, to;  // its bytes
  bool digests;  // the whole slice, and its digest
  Way way;
};

GIO_HD void warp_do(const SliceWork& work, const Part& part) {
  if (part.digests) {
    const Slice slice(*work.paged, work.layer, part.index, work.staged(part.index), part.way);
    settle_digest(work, part.index, warp_digest(slice));
  } else if (part.way != Way::kInPlace && part.from < part.to) {
    warp_move(work, part.index, part.from, part.to);
  }
}

// Moves, or digests in place, all slices of the layer; the work is spread over the grid.
GIO_HD void grid_do(const SliceWork& work, Way way) {
  const u32 pieces = work.pieces();
  const u32 units = work.paged->n_pages * pieces;  // of 16 KiB: they fit, as a layer does in memory
  const u32 step = gridDim.x * block_warps();
  for (u32 unit = blockIdx.x * block_warps() + warp_index(); unit < units; unit += step) {
    const u32 index = unit / pieces;
    const u32 from = (unit - index * pieces) * kPieceNbytes;
    const u32 to = work.nbytes - from < kPieceNbytes ? work.nbytes : from + kPieceNbytes;
    if (!work.is_lost(index)) warp_do(work, {index, from, to, work.has_digests(), way});
  }
}

// What a block does with a run.  kMove: moves it when its bytes have arrived.  kSplit: at the end
// of the share, digests slices that are split over several runs.
enum class Step : u32 { kMove, kSplit };

// The part of slice `number` of a run to handle in a step; none: from == to and no digest.
GIO_HD Part run_part(const SliceWork& work, const Run& run, u32 number, u32 piece, Step step) {
  const u64 slice_nbytes = static_cast<u64>(work.paged->slice_nlb) << work.paged->lba_shift;
  const u64 held =
      run.skip + (static_cast<u64>(run.nlb) << work.paged->lba_shift) - number * slice_nbytes;
  const u32 begin = number == 0 ? run.skip : 0;
  const bool is_whole = begin == 0 && held >= slice_nbytes;
  const u32 end = held < work.nbytes ? static_cast<u32>(held) : work.nbytes;
  const u32 index = run.first + number;
  if (step == Step::kSplit) {
    const bool begins = begin == 0 && !is_whole && !work.is_lost(index);
    return {index, 0, 0, begins, Way::kInPlace};
  }
  if (work.has_digests()) return {index, begin, end, is_whole, work.way()};
  const u32 low = piece * kPieceNbytes;
  const u32 from = begin > low ? begin : low;
  const u32 to = end < low + kPieceNbytes ? end : low + kPieceNbytes;
  return {index, from, to, false, work.way()};
}

// Handles the slices of one run with all warps of the block.  `unit` is the warp's first unit;
// returns its first one in the next run.  The assignment continues from run to run: otherwise runs
// of a single slice would all go to warp 0.
GIO_HD u32 block_do(const SliceWork& work, const Run& run, Step step, u32 unit) {
  const u32 pieces = work.pieces();
  const u32 units = run_slices(*work.paged, run) * pieces;
  for (; unit < units; unit += block_warps()) {
    const u32 number = unit / pieces;
    warp_do(work, run_part(work, run, number, unit - number * pieces, step));
  }
  return unit - units;
}

GIO_HD bool is_split(const SliceWork& work, const Run& run) {
  return run.skip != 0 || run.nlb % work.paged->slice_nlb != 0;
}

}  // namespace gio

// Which warps of a block digest a share's slices, on fibers, one case a line:
//
//   PAGES SLICES WARPS  ->  COUNT...
//
// PAGES slices of one page each, SLICES to a run.  COUNT: how many of them warp 0, 1, ... digested.
#include <cstdio>

#include "simt.h"  // first: words of CUDA
// Every digest is wrong here, and a warp that finds one looks at two shared words.
namespace turns {
constexpr unsigned kWordsOfASlice = 2;
std::vector<unsigned> looks;
inline void count() {
  ++looks[threadIdx.x / simt::kLanes];
  fiber::switch_point();
}
}  // namespace turns
#undef GIO_SCHED_POINT
#define GIO_SCHED_POINT() ::turns::count()
// The code under test.
#include "slices.cuh"

namespace {

using gio::u32;
using gio::u64;
constexpr u32 kNbytes = 512;

template <typename T>
u64 address_of(std::vector<T>& v) {
  return reinterpret_cast<u64>(v.data());
}

void run(u32 n_pages, u32 n_slices, u32 warps) {
  std::vector<gio::Quad> memory(n_pages * kNbytes / sizeof(gio::Quad));
  std::vector<u32> pages, page_status(n_pages);
  std::vector<u64> bases = {address_of(memory)}, digests(n_pages);
  std::vector<gio::Run> runs;
  for (u32 i = 0; i < n_pages; ++i) {
    pages.push_back(i);
    const u32 left = n_pages - i;
    if (i % n_slices == 0) runs.push_back({i, 1, left < n_slices ? left : n_slices, i, 0});
  }
  gio::Iocb paged = {};
  paged.pages = address_of(pages);
  paged.bases = address_of(bases);
  paged.segment_stride[0] = paged.segment_nbytes[0] = kNbytes;
  paged.n_pages = n_pages;
  paged.n_layers = paged.n_segments = paged.slice_nlb = 1;
  paged.opcode = gio::kRead;
  paged.lba_shift = 9;
  gio::SliceTable table = {};
  table.paged = reinterpret_cast<u64>(&paged);
  table.digests = address_of(digests);
  table.page_status = address_of(page_status);
  gio::LayerTally tally = {};
  gio::Batch batch = {};
  batch.slices = reinterpret_cast<u64>(&table);
  batch.tallies = reinterpret_cast<u64>(&tally);
  turns::looks.assign(warps, 0);
  fiber::Scheduler scheduler(n_pages);
  simt::Launch launch;
  launch.spawn(&scheduler, 1, warps, [&] {
    const gio::SliceWork work(&batch, 0);
    u32 unit = gio::warp_index();
    for (const gio::Run& one : runs) unit = block_do(work, one, gio::Step::kMove, unit);
  });
  scheduler.run(1u << 30);
  for (u32 looks : turns::looks) std::printf("%u ", looks / turns::kWordsOfASlice);
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main() {
  u32 pages, slices, warps;
  while (std::scanf("%u %u %u", &pages, &slices, &warps) == 3) {  // bounded by the input
    run(pages, slices, warps);
  }
  return 0;
}

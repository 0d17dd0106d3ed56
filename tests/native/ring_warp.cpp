// warp_kernel.cuh on fibers against a decoding controller, one case a line:
//
//   SEED DEPTH WARPS PSDT ALIGNED OPCODE MMIO SILENT  ->  FAULT STEPS
//
// A case draws a geometry, cuts the pages into runs, moves one layer, and compares the whole memory
// (or the whole medium) with what the IOCB's definition says, byte by byte.  SILENT: the controller
// takes commands and never completes one.
#include <cstdio>

#include "ring_harness.h"
// Words of CUDA, then the kernel.
#include "simt.h"
// The controller and the kernel under test.
#include "decoding_controller.h"
#include "warp_kernel.cuh"

namespace {

using gio::u32;
using gio::u64;
using gio::u8;
using Bytes = std::vector<u8>;

enum Fault : int { kNone = 0, kStalled = 1, kStatus = 2, kData = 3, kCidLost = 4, kCidReused = 5 };

struct Case {
  u64 seed;
  u32 depth, warps, psdt, aligned, opcode, mmio, silent;
};

constexpr u64 kPage = 4096;
constexpr u64 kIdleStepsMax = 200000;

u32 between(fiber::Random* random, u32 low, u32 high) {
  return low + random->below(high - low + 1);
}

u64 page_start(Bytes& bytes) { return (reinterpret_cast<u64>(bytes.data()) + kPage - 1) & -kPage; }

// A geometry, its memory and medium, and the runs that cover all blocks of all layers.
struct Scene {
  gio::Iocb io = {};
  std::vector<u32> pages;
  std::vector<u64> bases;
  std::vector<gio::Run> runs;
  u32 n_slots;  // pages in engine memory; io.n_pages of them are named
  u64 layer_nbytes = 0;
  Bytes memory, padding, medium;

  Scene(const Case& c, fiber::Random* random) {
    io.opcode = c.opcode;
    io.psdt = c.psdt;
    io.lba_shift = random->below(2) ? 9 : 12;
    io.n_layers = between(random, 1, 3);
    io.n_segments = between(random, 1, gio::kSegmentsMax);
    io.n_pages = between(random, 1, 24);
    n_slots = io.n_pages + random->below(4);
    draw_segments(c.aligned != 0, random);
    draw_pages(random);
    draw_runs(random);
    const u64 medium_nlb = static_cast<u64>(io.layer_stride_nlb) * io.n_layers + 64;
    fill(&medium, medium_nlb << io.lba_shift, random);
    io.runs = ring::address_of(runs);
    io.pages = ring::address_of(pages);
    io.bases = ring::address_of(bases);
  }

  u32 slice_nbytes() const { return io.slice_nlb << io.lba_shift; }

  // Where byte `position` of run's data lies in memory, or 0 for padding.
  u64 memory_of(const gio::Run& run, u32 layer, u64 position) const {
    const u64 from_first = run.skip + position;
    const u64 page = pages[run.first + from_first / slice_nbytes()];
    u64 offset = from_first % slice_nbytes();
    for (u32 k = 0; k < io.n_segments; ++k) {
      if (offset < io.segment_nbytes[k]) {
        return bases[layer * io.n_segments + k] + page * io.segment_stride[k] + offset;
      }
      offset -= io.segment_nbytes[k];
    }
    return 0;
  }
  u64 medium_of(const gio::Run& run, u32 layer, u64 position) const {
    return ((run.slba + static_cast<u64>(layer) * io.layer_stride_nlb) << io.lba_shift) + position;
  }

 private:
  static void fill(Bytes* bytes, u64 nbytes, fiber::Random* random) {
    bytes->resize(nbytes);
    for (u8& byte : *bytes) byte = static_cast<u8>(random->next());
  }

  void draw_segments(bool aligned, fiber::Random* random) {
    u32 slice = 0;
    std::vector<u64> offsets;
    for (u32 k = 0; k < io.n_segments; ++k) {
      const u32 nbytes = between(random, 1, aligned ? 3 : 9000) * (aligned ? kPage : 1);
      const u32 gap = random->below(2) ? 0 : aligned ? 4096 : random->below(100);
      io.segment_nbytes[k] = nbytes;
      io.segment_stride[k] = nbytes + gap;
      slice += nbytes;
    }
    const u32 lba = 1u << io.lba_shift;
    io.slice_nlb = (slice + lba - 1) >> io.lba_shift;
    // A whole block of padding; for PRP it must not end within a memory page.
    const bool room = slice % lba == 0 && (lba == kPage || !aligned);
    if (room && random->below(3) == 0) ++io.slice_nlb;
    for (u32 i = 0; i < io.n_layers * io.n_segments; ++i) {
      offsets.push_back(layer_nbytes);
      layer_nbytes += io.segment_stride[i % io.n_segments] * n_slots + (aligned ? kPage : 7);
      if (aligned) layer_nbytes = (layer_nbytes + kPage - 1) & -kPage;
    }
    fill(&memory, layer_nbytes + kPage, random);
    for (u64 offset : offsets) bases.push_back(page_start(memory) + offset);
    padding.assign(2 * kPage, 0);
    io.padding = page_start(padding);
  }

  void draw_pages(fiber::Random* random) {
    std::vector<u32> slots(n_slots);
    for (u32 i = 0; i < n_slots; ++i) slots[i] = i;
    for (u32 i = n_slots; i > 1; --i) std::swap(slots[i - 1], slots[random->below(i)]);
    if (random->below(4) == 0) std::sort(slots.begin(), slots.end());  // extents that join
    pages.assign(slots.begin(), slots.begin() + io.n_pages);
  }

  void draw_runs(fiber::Random* random) {
    const u32 blocks = io.n_pages * io.slice_nlb;
    const u32 nlb_max = between(random, 1, 4 * io.slice_nlb);
    for (u32 at = 0; at < blocks;) {
      const u32 nlb = std::min(blocks - at, between(random, 1 + nlb_max / 2, nlb_max));
      runs.push_back({8 + at, 1, nlb, at / io.slice_nlb, (at % io.slice_nlb) << io.lba_shift});
      at += nlb;
    }
    io.n_runs = static_cast<u32>(runs.size());
    io.layer_stride_nlb = blocks + random->below(5);
  }
};

// The launch: queue, job list, list memory, statuses.
struct Machine {
  ring::Queue queue;
  u32 layer, list_nbytes;
  std::vector<u32> statuses;
  Bytes lists;
  std::vector<gio::WarpJob> jobs;

  Machine(const Case& c, Scene* scene, fiber::Random* random)
      : queue(c.depth, c.depth - 1, 0),
        layer(random->below(scene->io.n_layers)),
        list_nbytes(kPage),
        statuses(scene->io.n_runs, 0xdeadu),
        lists(static_cast<size_t>(c.depth + 1) * kPage) {
    const u32 share = (scene->io.n_runs + c.warps - 1) / c.warps;
    for (u32 first = 0; first < scene->io.n_runs; first += share) {
      gio::WarpJob job = {};
      job.qp = reinterpret_cast<u64>(&queue.submitter);
      job.iocb = reinterpret_cast<u64>(&scene->io);
      job.statuses = ring::address_of(statuses) + first * sizeof(u32);
      job.lists = job.lists_dma = page_start(lists);
      job.timeout_ns = c.silent ? 20000 : ~0ull >> 1;
      job.list_nbytes = list_nbytes;
      job.layer = layer;
      job.first_run = first;
      job.n_runs = std::min(share, scene->io.n_runs - first);
      jobs.push_back(job);
    }
  }
  u32 cids_free() const {
    u32 n = 0;
    for (u32 word : queue.cid_free) n += static_cast<u32>(__builtin_popcount(word));
    return n;
  }
};

// What the definition says that memory (reads) or medium (writes) holds afterwards.
void expect(const Scene& scene, const Machine& machine, Bytes* memory, Bytes* medium) {
  const u64 origin = reinterpret_cast<u64>(scene.memory.data());
  for (u32 r = 0; r < scene.io.n_runs; ++r) {
    if (machine.statuses[r] != gio::kOk) continue;
    const gio::Run& run = scene.runs[r];
    for (u64 i = 0; i < static_cast<u64>(run.nlb) << scene.io.lba_shift; ++i) {
      const u64 from = scene.memory_of(run, machine.layer, i);
      u8& block = (*medium)[scene.medium_of(run, machine.layer, i)];
      if (scene.io.opcode == gio::kWrite) block = from == 0 ? 0 : (*memory)[from - origin];
      if (scene.io.opcode == gio::kRead && from != 0) (*memory)[from - origin] = block;
    }
  }
}

bool status_allowed(const Case& c, u32 status) {
  if (c.silent) return status == gio::kTimedOut;
  if (c.psdt == gio::kPsdtPrp && !c.aligned && status == gio::kInvalidPrpOffset) return true;
  return status == gio::kOk;
}

// After a timeout a command keeps its CID: as many are missing as the controller holds.
int check(const Case& c, const Scene& scene, const Machine& machine, const Bytes& memory,
          const Bytes& medium, u32 held) {
  if (machine.cids_free() + held != c.depth - 1) return held != 0 ? kCidReused : kCidLost;
  for (u32 status : machine.statuses) {
    if (!status_allowed(c, status)) return kStatus;
  }
  return memory == scene.memory && medium == scene.medium ? kNone : kData;
}

struct Outcome {
  int fault;
  u64 steps;
};

Outcome run(const Case& c) {
  fiber::Random random(c.seed);
  Scene scene(c, &random);
  Machine machine(c, &scene, &random);
  Bytes memory = scene.memory, medium = scene.medium;
  fiber::Scheduler scheduler(c.seed);
  simt::Launch launch;
  size_t lanes_left = machine.jobs.size() * simt::kLanes;
  launch.spawn(&scheduler, static_cast<u32>(machine.jobs.size()), [&] {
    (c.mmio ? gio_warp_mmio : gio_warp_word)(machine.jobs.data());
    --lanes_left;
  });
  u32 held = 0;
  scheduler.spawn(
      [&] {
        ring::DecodingController controller(machine.queue.controller, &scene.medium,
                                            scene.io.lba_shift, c.seed);
        gio::ControllerQueue silent = machine.queue.controller;
        gio::Sqe sqe;
        while (lanes_left != 0) {  // bounded by kIdleStepsMax
          if (c.silent ? sq_fetch(&silent, &sqe) : controller.step()) {
            held += c.silent;
            scheduler.progress();
          }
          fiber::switch_point();
        }
        while (c.silent && sq_fetch(&silent, &sqe)) ++held;
      },
      1u << random.below(6));
  if (!scheduler.run(kIdleStepsMax)) return {kStalled, scheduler.steps()};
  expect(scene, machine, &memory, &medium);
  return {check(c, scene, machine, memory, medium, held), scheduler.steps()};
}

}  // namespace

int main() {
  Case c;
  while (std::scanf("%llu %u %u %u %u %u %u %u", &c.seed, &c.depth, &c.warps, &c.psdt, &c.aligned,
                    &c.opcode, &c.mmio, &c.silent) == 8) {  // bounded by the input
    const Outcome outcome = run(c);
    std::printf("%d %llu\n", outcome.fault, static_cast<unsigned long long>(outcome.steps));
    std::fflush(stdout);
  }
  return 0;
}

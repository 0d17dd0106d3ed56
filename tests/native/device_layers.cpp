// The device kernels on fibers, all layers of one batch, one case a line:
//
//   SEED DEPTH SHARES WARPS PSDT ALIGNED OPCODE MMIO ENGINE STAGED DIGESTS FAULTS  ->  FAULT STEPS
//
// device_scene.h explains the words.  The whole memory, or the whole medium, is compared with
// what the IOCB's definition says; pages that the kernels gave up may hold anything.
#include <cstdio>

#include "simt.h"  // first: words of CUDA
// Doorbells in mmio space go to the emulated BAR page.
namespace bar {
inline void mmio_store(unsigned* p, unsigned v);
}
#define GIO_MMIO_STORE(p, v) ::bar::mmio_store(p, v)
// The kernels under test, and the other side.
#include "device_drive.h"
#include "kernels.cu"

inline void bar::mmio_store(unsigned* p, unsigned v) { bar::active()->store(p, v); }

namespace device {

enum Fault : int {
  kNone = 0,
  kStalled = 1,   // commands are left, nothing moves
  kStatus = 2,    // a status that nothing has caused
  kData = 3,      // bytes are wrong, or outside of what was to be moved
  kCids = 4,      // CIDs are lost, or back though the drive still has the command
  kDoorbell = 5,  // the BAR page refused a write, or was written for a plain word
  kFlag = 6,      // a layer's flag does not say what happened
  kEarly = 7,     // the flag was there before the bytes
  kUnmarked = 8,  // a run failed and its page does not know
  kDigest = 9,    // a written slice's digest
  kSent = 11,     // a share sent something after its deadline
  kWaited = 12,   // a layer waited for queues whose deadline had passed in one before
};

constexpr u64 kIdleStepsMax = 3'000'000;
constexpr u64 kSilenceSteps = 20000;
constexpr u32 kReady = 7;

gio::FaultConfig fault_config(const Case& c, fiber::Random* random) {
  gio::FaultConfig f = {};
  f.seed = c.seed;
  f.status = gio::kUnrecoveredRead;
  f.delay_turns = 8;
  if (c.faults == 1) {
    f.status_ppm = 150'000;
    f.delay_ppm = f.reorder_ppm = 300'000;
  }
  if (c.faults == 2) f.stall_from = 1 + random->below(4);
  if (c.faults == 3) f.short_ppm = 300'000;  // short_status 0: only the digest notices
  return f;
}

// Everything a launch takes.
struct Machine {
  const Case c;
  Scene* scene;
  bar::Page page;
  Queues queues;
  Bytes lists;
  std::vector<gio::QueueShare> shares;
  std::vector<gio::RunState> states;
  std::vector<gio::LayerWord> flags;
  std::vector<gio::LayerTally> tallies;
  std::vector<u32> page_status, consumed;
  gio::SliceTable slices = {};
  gio::Batch batch = {};
  std::vector<gio::Post> posts;
  alignas(64) u32 posted = 0;
  alignas(64) u32 stop = 0;
  gio::Mailbox mailbox = {};
  std::unique_ptr<Drive> drive;
  std::vector<bool> seen;
  int fault = kNone;

  Machine(const Case& the_case, Scene* the_scene, fiber::Random* random)
      : c(the_case), scene(the_scene) {
    // Shares may share a queue, unless they send ahead.
    const u32 n_queues = random->below(3) || c.engine == 3 ? c.shares : 1;
    page.stride = 4u << random->below(3);
    for (u32 i = 0; i < n_queues; ++i) {
      queues.push_back(std::make_unique<Queue>(c.depth, i + 1, c.mmio ? &page : nullptr));
      page.rings.push_back({&queues.back()->submitter});
    }
    lists.resize((static_cast<size_t>(c.depth) * n_queues + 1) * kPage);
    make_shares(random);
    make_batch();
    make_drive(random);
    bar::active() = &page;
  }

  bool is_read() const { return c.opcode == gio::kRead; }
  u32 n_layers() const { return scene->paged.n_layers; }
  const gio::RunState& state(u32 layer, u32 run) const {
    return states[layer * scene->paged.n_runs + run];
  }

 private:
  // The pieces of a slice belong to one share.
  void make_shares(fiber::Random* random) {
    const u32 n_runs = scene->paged.n_runs;
    u32 first = 0;
    for (u32 s = 0; s < c.shares; ++s) {
      u32 end = s + 1 == c.shares ? n_runs : std::min(n_runs, first + random->below(n_runs + 1));
      while (end < n_runs && scene->runs[end].skip != 0) ++end;
      const u32 q = s % static_cast<u32>(queues.size());
      gio::QueueShare share = {};
      share.qp = reinterpret_cast<u64>(&queues[q]->submitter);
      share.lists = share.lists_dma = page_start(lists) + q * c.depth * kPage;
      share.list_nbytes = kPage;
      share.first_run = first;
      share.n_runs = end - first;
      shares.push_back(share);
      first = end;
    }
  }

  void make_batch() {
    const u32 layers = n_layers();
    states.assign(layers * scene->paged.n_runs, {gio::kNoCid, gio::kRunPending});
    flags.assign(layers, {0, 0});
    tallies.assign(layers, {0, 0, 0, 0});
    page_status.assign(scene->paged.n_pages, 0);
    seen.assign(layers, false);
    slices.paged = reinterpret_cast<u64>(&scene->paged);
    slices.staged_bases = c.staged ? address_of(scene->staged_bases) : 0;
    slices.staged_stride = scene->staged_stride;
    slices.digests = c.digests ? address_of(scene->digests) : 0;
    slices.page_status = address_of(page_status);
    batch.iocb = reinterpret_cast<u64>(&scene->issued);
    batch.shares = address_of(shares);
    batch.states = address_of(states);
    batch.slices = reinterpret_cast<u64>(&slices);
    batch.flags = address_of(flags);
    batch.tallies = address_of(tallies);
    batch.timeout_ns = c.faults == 2 ? kSilenceSteps : ~0ull >> 1;
    batch.n_shares = c.shares;
    batch.ready = kReady;
    posts.resize(2);
    consumed.assign(c.shares, 0);
    mailbox.posts = address_of(posts);
    mailbox.posted = reinterpret_cast<u64>(&posted);
    mailbox.stop = reinterpret_cast<u64>(&stop);
    mailbox.consumed = address_of(consumed);
    mailbox.idle_timeout_ns = ~0ull >> 1;
    mailbox.capacity = static_cast<u32>(posts.size());
  }

  void make_drive(fiber::Random* random) {
    if (c.faults == 0 && random->below(2) != 0) {
      drive = std::make_unique<DecodingDrive>(&queues, scene, c.seed);
      return;
    }
    auto memory = std::make_unique<MemoryDrive>(&queues, scene, fault_config(c, random));
    memory->allow(&lists);
    drive = std::move(memory);
  }
};

// Whether a page's bytes are to be relied on.
bool is_good(const Machine& m, u32 page) { return m.page_status[page] == 0; }

bool layer_is_right(const Machine& m, u32 layer) {
  const Scene& scene = *m.scene;
  for (const gio::Run& run : scene.runs) {
    for (u64 i = 0; i < scene.run_nbytes(run); ++i) {
      const Place place = scene.place_of(run, layer, i);
      if (place.address == 0 || !is_good(m, place.page)) continue;
      if (*gio::at<const u8>(place.address) != scene.medium[scene.medium_of(run, layer, i)]) {
        return false;
      }
    }
  }
  return true;
}

// Runs one kernel to its end while the drive executes commands.
template <typename Kernel>
bool launch(Machine* m, u64 seed, u32 blocks, u32 warps, const Kernel& kernel, u64* steps) {
  fiber::Scheduler scheduler(seed);
  fiber::Random random(seed);
  simt::Launch threads;
  size_t left = static_cast<size_t>(blocks) * warps * simt::kLanes;
  threads.spawn(&scheduler, blocks, warps, [&] {
    kernel();
    --left;
  });
  const auto serve = [&] {
    while (left != 0) {  // bounded by kIdleStepsMax
      if (m->drive->step()) scheduler.progress();
      for (u32 layer = 0; layer < m->n_layers(); ++layer) {
        if (m->seen[layer] || m->flags[layer].ready == 0) continue;
        m->seen[layer] = true;
        if (m->is_read() && !layer_is_right(*m, layer)) m->fault = kEarly;
      }
      fiber::switch_point();
    }
  };
  scheduler.spawn(serve, 1u << random.below(6));
  const bool finished = scheduler.run(kIdleStepsMax);
  *steps += scheduler.steps();
  return finished;
}

// The kernels of one layer, in the order that parameters.cuh gives.
bool run_layer(Machine* m, u32 layer, u64* steps) {
  const Case& c = m->c;
  const gio::Batch* batch = &m->batch;
  u64 seed = c.seed + layer;
  const auto grid = [&](auto kernel, u32 publish) {
    const u32 blocks = 1 + static_cast<u32>(seed % 3);
    return launch(m, ++seed, blocks, c.warps, [=] { kernel(batch, layer, publish); }, steps);
  };
  const auto queue = [&](auto kernel) { return launch(m, ++seed, c.shares, 1, kernel, steps); };
  if (c.engine == 1) {
    const auto kernel = c.mmio ? gio_resident_mmio : gio_resident_word;
    return launch(m, ++seed, c.shares, c.warps, [=] { kernel(batch, layer, 1); }, steps);
  }
  const auto submit = c.mmio ? gio_submit_mmio : gio_submit_word;
  const auto drain = c.mmio ? gio_drain_mmio : gio_drain_word;
  bool ok = true;
  if (!m->is_read() && c.staged) ok = grid(gio_move, 0);
  if (!m->is_read() && !c.staged && c.digests) ok = grid(gio_verify, 0);
  const bool ends_with_drain = !m->is_read() || (!c.staged && !c.digests);
  const bool leads = c.engine == 3 && layer + 1 < m->n_layers();
  if (c.engine != 3 || layer == 0) ok = ok && queue([=] { submit(batch, layer); });
  if (leads) ok = ok && queue([=] { submit(batch, layer + 1); });
  ok = ok && queue([=] { drain(batch, layer, ends_with_drain); });
  if (m->is_read() && c.staged) ok = ok && grid(gio_move, 1);
  if (m->is_read() && !c.staged && c.digests) ok = ok && grid(gio_verify, 1);
  return ok;
}

// One kernel for layers `from` to `to`, and a host that posts them and then tells it to end.
bool run_posts(Machine* m, u32 from, u32 to, u64* steps) {
  fiber::Scheduler scheduler(m->c.seed + from);
  simt::Launch threads;
  const auto kernel = m->c.mmio ? gio_persistent_mmio : gio_persistent_word;
  size_t left = static_cast<size_t>(m->c.shares) * m->c.warps * simt::kLanes;
  threads.spawn(&scheduler, m->c.shares, m->c.warps, [&] {
    kernel(&m->mailbox);
    --left;
  });
  scheduler.spawn([&] {
    while (left != 0) {  // bounded by kIdleStepsMax
      if (m->drive->step()) scheduler.progress();
      fiber::switch_point();
    }
  });
  scheduler.spawn([&] {
    for (u32 layer = from; layer < to; ++layer) {
      const auto is_free = [&](u32 n) { return layer - n < m->mailbox.capacity; };
      while (!std::all_of(m->consumed.begin(), m->consumed.end(), is_free)) fiber::switch_point();
      m->posts[layer % m->mailbox.capacity] = {reinterpret_cast<u64>(&m->batch), layer, 1};
      gio::store_release(&m->posted, layer + 1);
    }
    while (gio::load_acquire(&m->flags[to - 1].ready) == 0) fiber::switch_point();
    if (m->is_read() && !layer_is_right(*m, to - 1)) m->fault = kEarly;
    gio::store_release(&m->stop, 1);
  });
  const bool finished = scheduler.run(kIdleStepsMax);
  *steps += scheduler.steps();
  return finished;
}

// All layers; some kernels are told to end after the first and launched again: they go on there.
bool run_persistent(Machine* m, u64* steps) {
  const u32 layers = m->n_layers(), first = m->c.seed % 2 == 0 ? layers : 1;
  if (!run_posts(m, 0, first, steps)) return false;
  m->stop = 0;
  return first == layers || run_posts(m, first, layers, steps);
}

u32 owned(const Machine& m) {
  u32 n = 0;
  for (const gio::LayerTally& tally : m.tallies) n += tally.owned;
  return n;
}
u32 cids_missing(const Machine& m) {
  u32 n = 0;
  for (const auto& queue : m.queues) n += m.c.depth - 1 - queue->free_cids();
  return n;
}

bool status_allowed(const Case& c, u32 status) {
  if (status == gio::kOk) return true;
  if (c.psdt == gio::kPsdtPrp && !c.aligned && status == gio::kInvalidPrpOffset) return true;
  if (c.faults == 1) return status == gio::kUnrecoveredRead;
  return c.faults == 2 && status == gio::kTimedOut;
}

// Statuses, pages and flags tell the same story.
int check_words(const Machine& m) {
  for (u32 layer = 0; layer < m.n_layers(); ++layer) {
    bool failed = false;
    for (u32 r = 0; r < m.scene->paged.n_runs; ++r) {
      const u32 status = m.state(layer, r).status;
      if (!status_allowed(m.c, status)) return kStatus;
      if (status == gio::kOk) continue;
      failed = true;
      const gio::Run& run = m.scene->runs[r];
      for (u32 i = 0; i < run_slices(m.scene->paged, run); ++i) {
        if (is_good(m, run.first + i)) return kUnmarked;
      }
    }
    const gio::LayerWord& flag = m.flags[layer];
    if (flag.ready != kReady || (failed && flag.status == 0)) return kFlag;
    if (m.c.faults == 0 && flag.status != 0 && !failed) return kFlag;
  }
  const auto is_marked = [](u32 status) { return status != 0; };
  const bool any = std::any_of(m.page_status.begin(), m.page_status.end(), is_marked);
  const bool may = m.c.faults != 0 || m.c.psdt == gio::kPsdtPrp;
  return any && !may ? kStatus : kNone;
}

// After a deadline a share sends nothing; the layer that was sent ahead by then it gives up.
int check_lost(const Machine& m) {
  for (const gio::QueueShare& share : m.shares) {
    bool is_lost = false;
    u32 ahead = m.c.engine == 3 ? 1 : 0;
    for (u32 layer = 0; layer < m.n_layers(); ++layer) {
      const bool is_silent = is_lost && ahead == 0;
      if (is_lost && ahead != 0) --ahead;
      for (u32 r = share.first_run; r < share.first_run + share.n_runs; ++r) {
        const gio::RunState& state = m.state(layer, r);
        const bool is_unsent = state.cid == gio::kNoCid && state.status == gio::kTimedOut;
        if (is_silent && !is_unsent) return kSent;
        is_lost = is_lost || state.status == gio::kTimedOut;
      }
    }
  }
  return kNone;
}

// Whether no share waits for its queue any more.
bool all_lost(const Machine& m) {
  const auto is_over = [](const gio::QueueShare& s) { return s.lost != 0 || s.n_runs == 0; };
  return std::all_of(m.shares.begin(), m.shares.end(), is_over);
}

// Nothing but what was to be moved has changed, and that is right.
int check_bytes(const Machine& m, const Bytes& memory, const Bytes& medium) {
  const Scene& scene = *m.scene;
  const u64 origin = reinterpret_cast<u64>(scene.memory.data());
  Bytes right_memory = memory, right_medium = medium;
  for (u32 layer = 0; layer < m.n_layers(); ++layer) {
    for (u32 r = 0; r < scene.paged.n_runs; ++r) {
      const gio::Run& run = scene.runs[r];
      const bool ran = m.state(layer, r).status == gio::kOk;
      for (u64 i = 0; i < scene.run_nbytes(run); ++i) {
        const Place place = scene.place_of(run, layer, i);
        const u64 block = scene.medium_of(run, layer, i), at = place.address - origin;
        if (!m.is_read()) {
          const u8 sent = place.address == 0 ? 0 : memory[at];
          right_medium[block] = ran ? sent : scene.medium[block];
        } else if (place.address != 0) {
          right_memory[at] = is_good(m, place.page) ? medium[block] : scene.memory[at];
        }
      }
    }
  }
  if (right_memory != scene.memory || right_medium != scene.medium) return kData;
  if (m.is_read() || m.c.digests == 0) return kNone;
  for (u32 i = 0; i < scene.paged.n_pages; ++i) {
    for (u32 l = 0; l < m.n_layers() && is_good(m, i); ++l) {
      if (scene.digests[i * m.n_layers() + l] != scene.digest_of(l, i)) return kDigest;
    }
  }
  return kNone;
}

struct Outcome {
  int fault;
  u64 steps;
};

Outcome run(const Case& c) {
  fiber::Random random(c.seed);
  Scene scene(c, &random);
  Machine m(c, &scene, &random);
  const Bytes memory = scene.memory, medium = scene.medium;
  Outcome outcome = {kNone, 0};
  bool finished = true;
  if (c.engine == 2) {
    finished = run_persistent(&m, &outcome.steps);
  } else {
    for (u32 layer = 0; layer < m.n_layers() && finished; ++layer) {
      const u64 limit = all_lost(m) ? outcome.steps + kSilenceSteps : ~0ull;
      finished = run_layer(&m, layer, &outcome.steps);
      if (outcome.steps > limit) m.fault = kWaited;
    }
  }
  outcome.fault = !finished ? kStalled : m.fault;
  if (outcome.fault == kNone && owned(m) != cids_missing(m)) outcome.fault = kCids;
  if (outcome.fault == kNone) outcome.fault = check_words(m);
  if (outcome.fault == kNone) outcome.fault = check_lost(m);
  m.drive->answer();  // what went unanswered, which changes nothing any more
  m.drive->read_back(&scene.medium);
  if (outcome.fault == kNone) outcome.fault = check_bytes(m, memory, medium);
  const auto ended_well = [](const gio::RunState& state) { return state.status == gio::kOk; };
  const bool any = std::any_of(m.states.begin(), m.states.end(), ended_well);
  const bool is_rung = m.page.writes != 0;
  if (m.page.is_broken || (c.mmio ? any && !is_rung : is_rung)) outcome.fault = kDoorbell;
  return outcome;
}

}  // namespace device

int main() {
  device::Case c;
  while (std::scanf("%llu %u %u %u %u %u %u %u %u %u %u %u", &c.seed, &c.depth, &c.shares, &c.warps,
                    &c.psdt, &c.aligned, &c.opcode, &c.mmio, &c.engine, &c.staged, &c.digests,
                    &c.faults) == 12) {  // bounded by the input
    const device::Outcome outcome = device::run(c);
    std::printf("%d %llu\n", outcome.fault, static_cast<unsigned long long>(outcome.steps));
    std::fflush(stdout);
  }
  return 0;
}

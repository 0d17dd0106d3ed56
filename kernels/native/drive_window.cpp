// Decides what a drive may have in flight, from measurements: its windows, and how loads begin.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "drive_loop.h"

namespace gio {
namespace {

// The share of the best rate that windows must reach: for stores, and while a layer is waited for
// (narrow); and for others (wide).
constexpr double kNarrowShare = 0.98;
constexpr double kWideShare = 0.995;
// Most bytes that a window starts with: for stores, because a new load waits for those in flight;
// and while a layer is waited for, because it may be reported only with the last one in flight.
constexpr u64 kStartStoreNbytes = 4 << 20;
constexpr u64 kStartWaitedNbytes = 8 << 20;
constexpr u64 kSizeNbytes[] = {64 << 10, 256 << 10, 512 << 10, 1 << 20};

}  // namespace

void ServiceThread::start_windows() {
  for (u32 kind = 0; kind < kKinds; ++kind) {
    const bool store = kind >= kSizes;
    const u64 size = kSizeNbytes[kind % kSizes];
    windows_[0][kind].start(size, store ? kStartStoreNbytes : ~u64{0},
                            store ? kNarrowShare : kWideShare);
    windows_[1][kind].start(size, store ? kStartStoreNbytes : kStartWaitedNbytes, kNarrowShare);
  }
}

u32 ServiceThread::kind_of(u32 opcode, u64 nbytes) {
  u32 size = 0;
  while (size + 1 < kSizes && nbytes > kSizeNbytes[size]) ++size;
  return size + (opcode == kWrite ? kSizes : 0);
}

u64 ServiceThread::window(u32 kind) {
  return fixed_window_ != 0 ? fixed_window_ : window_of(kind).nbytes();
}

// Ends the sample of a kind: later deliveries were not issued under its windows alone.
void ServiceThread::interrupt(u32 kind) {
  windows_[0][kind].interrupt();
  windows_[1][kind].interrupt();
}

// Whether the next command of a part must wait for one in flight.  Some drives report commands only
// when all commands in flight have ended.  So a load that finds the drive idle begins with its
// first layer, or with what the drive moves in the time of a single command, and goes on with that
// and three times what has arrived.  A drive that was seen to report so gets little more than the
// first layer, and then the rest, because each group costs a pause.  If such a load's layers are
// consumed one by one, it is issued in groups that arrive when they are needed.
bool ServiceThread::is_full(Part* part, u32 kind, u64 nbytes) {
  if (part->job->config.priority == kRecords) return false;
  const bool is_grouped = fixed_window_ == 0 && comes_in_groups(*part);
  if (is_grouped && part->in_flight == 0) begin_group(part, kind, nbytes);
  if (active_.empty()) return false;
  if (begins_slowly(*part)) return is_slow_ = true;
  if (is_grouped) {
    waits_for_group_ = part->next >= part->group_end && clock_ns() < part->group_until_ns;
    if (part == opening_ && !waits_for_group_) wants_alone_ = false;  // or others wait for it
  } else if (fixed_window_ == 0 && opening_ != nullptr) {
    if (wants_alone_) return true;
    const bool is_first = part == opening_ && part->next < part->n_runs;
    const u64 alone_nbytes = opening_rate_ / 1000 * alone_ns(kind) / 1'000'000;
    u64 most = alone_nbytes + 3 * opening_nbytes_;
    if (reports_together()) {
      most = opening_nbytes_ < opening_->layer_nbytes ? alone_nbytes / 2 : ~u64{0};
    }
    waits_for_group_ = !is_first && inflight_nbytes_ + nbytes > most;
  }
  if (waits_for_group_) return true;
  return active_.size() >= kFloorCommands && inflight_nbytes_ + nbytes > window(kind);
}

// Whether a store that yields to loads, and found the drive idle, waits until as many of its
// commands have ended as are in flight: a load often follows at once, and must wait for these.
bool ServiceThread::begins_slowly(const Part& part) const {
  const bool can_stop = part.job->config.priority == kStores && part.job->config.held != 0;
  return can_stop && part.from_idle && active_.size() == part.in_flight &&
         2 * part.in_flight > part.next;
}

// Whether a thread consumes a load's layers, the drive has no other load, and commands in flight
// together delay each other's completions.
bool ServiceThread::comes_in_groups(const Part& part) const {
  const Job& job = *part.job;
  return reports_together() && opening_rate_ != 0 && job.config.priority == kLoads &&
         loads_due_ <= 1 && job.consumer.asked() != 0 && part.layer_nbytes != 0;
}

// Begins the next group of commands of a part that has none in flight.
void ServiceThread::begin_group(Part* part, u32 kind, u64 nbytes) {
  const Job& job = *part->job;
  const u32 ready = static_cast<u32>(part->next / part->n_runs);
  const u64 kilo_rate = std::max(window_of(kind).rate(), opening_rate_) / 1000 + 1;
  const u64 command_ns = nbytes * 1'000'000 / kilo_rate;
  const u64 layer_ns = part->layer_nbytes * 1'000'000 / kilo_rate;
  const u64 pause_ns = std::max(alone_ns(kind), command_ns) - command_ns;
  u64 pace_ns = job.consumer.pace_ns();
  // Until it is measured, only the fast ones before it count: a longer pace may be another model's.
  if (pace_ns == 0 && job.consumer.expected_ns() < layer_ns) pace_ns = job.consumer.expected_ns();
  u32 layers = 1;
  if (ready != 0 && pace_ns != 0) {
    const u64 busy_ns = job.consumer.busy_ns(ready, clock_ns());
    layers = layers_at_once(job.n_layers - ready, busy_ns, layer_ns, pause_ns, pace_ns);
  }
  const u32 asked = std::min(job.consumer.asked(), job.n_layers);
  layers = std::max(layers, asked - std::min(asked, ready));
  part->group_end = static_cast<u64>(ready + layers) * part->n_runs;
  part->group_until_ns = clock_ns() + kOpeningNs;
}

// Time of a command of this kind with no other in flight.
u64 ServiceThread::alone_ns(u32 kind) const {
  if (alone_ns_[kind] != 0) return alone_ns_[kind];
  return *std::max_element(std::begin(alone_ns_), std::end(alone_ns_));
}

// Measures a command that ended.  A failed one says nothing about the drive's speed, but ends an
// opening like any other.
void ServiceThread::measure(const Command& command, u32 status, u64 clock_ns) {
  if (command.nbytes == 0) return;
  const u32 direction = command.kind / kSizes;
  u64& latency_ns = latency_ns_[direction];
  const u64 took_ns = clock_ns - command.issued_ns;
  if (status == kOk) {
    latency_ns = latency_ns == 0 ? took_ns : latency_ns - latency_ns / 16 + took_ns / 16;
  }
  if (command.is_alone) {
    u64& alone_ns = alone_ns_[command.kind];  // the least, which a slower drive raises in time
    if (status == kOk) {
      alone_ns = alone_ns == 0 ? took_ns : std::min(took_ns, alone_ns + alone_ns / 8);
    }
    wants_alone_ = false;
  }
  if (opening_ != nullptr) {
    interrupt(command.kind);
    opening_nbytes_ += command.nbytes;
    const u64 took_us = std::max<u64>((clock_ns - opening_ns_) / 1000, 1);
    const u64 rate = opening_nbytes_ * 1'000'000 / took_us;
    if (status == kOk) opening_rate_ = std::max(opening_rate_, rate);
    if (opening_nbytes_ >= window(command.kind)) opening_ = nullptr;
  } else if (waits_for_group_ || is_slow_) {
    interrupt(command.kind);
  } else if (is_full_) {
    window_of(command.kind).delivered(clock_ns, command.nbytes);
  }
}

// Publishes the windows' statistics to other threads.
void ServiceThread::publish_windows() {
  u64 words[sizeof(WindowStats) / sizeof(u64)];
  WindowStats stats = {};
  for (u32 direction = 0; direction < 2; ++direction) {
    const u32 kind = kind_of_direction_[direction];
    const Window& waited = windows_[1][kind];
    const Window& window = waited.samples() != 0 ? waited : windows_[0][kind];
    stats.window_nbytes[direction] = fixed_window_ != 0 ? fixed_window_ : window.nbytes();
    stats.rate[direction] = window.rate();
    stats.latency_ns[direction] = latency_ns_[direction];
    stats.samples[direction] = window.samples();
  }
  stats.inflight_nbytes = inflight_nbytes_;
  std::memcpy(words, &stats, sizeof stats);
  for (size_t i = 0; i < std::size(words); ++i) {
    window_stats_[i].store(words[i], std::memory_order_relaxed);
  }
}

WindowStats ServiceThread::window_stats() const {
  u64 words[sizeof(WindowStats) / sizeof(u64)];
  for (size_t i = 0; i < std::size(words); ++i) {
    words[i] = window_stats_[i].load(std::memory_order_relaxed);
  }
  WindowStats stats;
  std::memcpy(&stats, words, sizeof stats);
  stats.commands = stats_[kCommands];
  stats.bytes_read = stats_[kBytesRead];
  stats.bytes_written = stats_[kBytesWritten];
  return stats;
}

}  // namespace gio

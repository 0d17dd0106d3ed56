#include "engine.h"

#include <errno.h>
#include <time.h>

#include <algorithm>
#include <chrono>

#include "hash.h"

namespace gio {
namespace {

constexpr u64 kTickNs = 20'000'000;   // how often deadlines are looked at
constexpr u64 kIdleNs = 200'000'000;  // a sleeping engine looks up this often without a wake

u64 clock_ns(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000u + static_cast<u64>(t.tv_nsec);
}
u64 now_ns() { return clock_ns(CLOCK_MONOTONIC); }

enum Stat { kCommands, kBytesRead, kBytesWritten, kJobs, kTimeouts, kCpu, kDigest };

bool moves_pages(const Iocb& io) { return io.opcode == kRead || io.opcode == kWrite; }

}  // namespace

Job::Job(const JobConfig& c)
    : config(c),
      runs(at<Run>(c.iocb.runs)),
      n_layers(c.iocb.n_layers),
      whole_slices(true),
      layer_left(c.iocb.n_layers, c.iocb.n_runs),
      n_commands(static_cast<u64>(c.iocb.n_layers) * c.iocb.n_runs),
      gate(c.gated == 0),
      submitted_ns(now_ns()) {
  if (c.gated != 0) deferred.reserve(n_commands);
  if (config.digest == kDigestNone) return;
  for (u32 r = 0; r < c.iocb.n_runs && whole_slices; ++r) {
    whole_slices = runs[r].skip == 0 && runs[r].nlb % c.iocb.slice_nlb == 0;
  }
  if (!whole_slices) {
    slice_left.assign(static_cast<size_t>(n_layers) * c.iocb.n_pages, c.iocb.slice_nlb);
  }
}

Engine::Engine(Controller* controller, QueuePair* qp, u64 lists, u32 list_nbytes, u32 inflight_max)
    : controller_(controller),
      qp_(qp),
      lists_(lists),
      list_nbytes_(list_nbytes),
      inflight_max_(std::min(inflight_max, qp->depth - 1)),
      commands_(qp->depth) {
  for (auto& s : stats_) s = 0;
  active_.reserve(qp->depth);
  // issue() stops at twice the depth; a turn and a reset can each add as many as are in flight.
  finished_.reserve(4 * qp->depth);
  finishing_.reserve(4 * qp->depth);
  thread_ = std::thread([this] { loop(); });
}

Engine::~Engine() {
  if (thread_.joinable()) thread_.join();  // stop() came before and bounded this
}

int Engine::submit(const JobConfig& config, Job** out) {
  Job* job = new Job(config);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (exited_ || stop_) {
      delete job;
      return -ESHUTDOWN;
    }
    incoming_.push_back(job);
  }
  controller_->wake();
  *out = job;
  return 0;
}

int Engine::wait_layers(const Job* job, u32 layers, u64 timeout_ns) {
  auto ready = [&] { return job->layers_ready >= layers || job->done; };
  if (ready()) return 0;
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiters_;
  const bool ok = changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready);
  --waiters_;
  return ok ? 0 : -ETIMEDOUT;
}

int Engine::wait_released(const Job* job, u64 timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiters_;
  const bool ok = changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                                    [&] { return job->released.load(); });
  --waiters_;
  return ok ? 0 : -ETIMEDOUT;
}

void Engine::open_gate(Job* job) {
  job->gate = true;
  gate_opened_ = true;
  controller_->wake();
}

void Engine::cancel(Job* job) {
  job->cancel = true;
  gate_opened_ = true;
  controller_->wake();
}

u64 Engine::next_released(u64 timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiters_;
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                    [&] { return !released_.empty() || exited_; });
  --waiters_;
  const Job* job = released_.pop_front();
  if (job == nullptr) return exited_ ? ~0ull : 0;
  return job->config.tag;
}

int Engine::reset(u64 timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (exited_) return 0;
  reset_wanted_ = true;
  reset_timeout_ns_ = timeout_ns;
  controller_->wake();
  ++waiters_;
  const bool ok = changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns + 2 * kIdleNs),
                                    [&] { return !reset_wanted_ || exited_; });
  --waiters_;
  return ok ? reset_result_ : -ETIMEDOUT;
}

int Engine::stop(u64 timeout_ns) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stop_ = true;
    controller_->wake();
    changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return exited_; });
  }
  if (!thread_.joinable()) return 0;
  if (reset(timeout_ns) != 0) return -EBUSY;
  thread_.join();  // nothing is outstanding, so the loop ends at its next turn
  return 0;
}

EngineStats Engine::stats() const {
  return EngineStats{stats_[kCommands], stats_[kBytesRead], stats_[kBytesWritten], stats_[kJobs],
                     stats_[kTimeouts], stats_[kCpu],       stats_[kDigest]};
}

// The dispatcher.  It ends when stop() was called and nothing is left; each turn is bounded by
// kIdleNs.
void Engine::loop() {
  bool running = true;
  while (running) {
    accept();
    const u64 now = now_ns();
    const bool issued = issue(now);
    if (issued) sq_ring<WordDoorbell>(qp_);
    const bool busy = !finished_.empty() || gate_opened_;
    const u64 idle_ns = inflight_ != 0 ? kTickNs : kIdleNs;
    controller_->service(busy ? 0 : blocked_.empty() ? idle_ns : mover_ns_);
    finishing_.swap(finished_);
    for (auto& f : finishing_) finish(f.first, f.second);
    finishing_.clear();
    if (gate_opened_.exchange(false) || stop_) run_gates();  // pairs with open_gate
    reap();
    run_blocked(now);
    if (now >= next_check_ns_) {
      check_deadlines(now);
      stats_[kCpu] = clock_ns(CLOCK_THREAD_CPUTIME_ID);
      next_check_ns_ = now + kTickNs;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (reset_wanted_) {
      lock.unlock();
      const int result = controller_->reset(reset_timeout_ns_);
      reap();
      lock.lock();
      reset_result_ = result;
      reset_wanted_ = false;
      changed_.notify_all();
    }
    running = !(stop_ && incoming_.empty() && inflight_ == 0 && finished_.empty() &&
                gated_.empty() && blocked_.empty());
    for (const auto& queue : ready_) running = running || !queue.empty();
  }
  controller_->unclaim();
  std::lock_guard<std::mutex> lock(mutex_);
  exited_ = true;
  changed_.notify_all();
}

void Engine::accept() {
  while (Job* job = next_incoming()) {  // bounded by what was submitted
    ++stats_[kJobs];
    if (job->n_commands == 0) {
      advance(job);
      maybe_release(job);
      continue;
    }
    if (!job->gate) gated_.push_back(job);
    ready_[std::min(job->config.priority, kPriorities - 1)].push_back(job);
  }
}

Job* Engine::next_incoming() {
  std::lock_guard<std::mutex> lock(mutex_);
  return incoming_.pop_front();
}

// Lower priorities go first, but an eighth of the places is the last one's: stores must not starve
// beside loads.
Job* Engine::next_job() {
  const u32 last = kPriorities - 1;
  const u32 share = std::max(1u, inflight_max_ / 8);
  const bool owed = !ready_[last].empty() && inflight_late_ < share;
  for (u32 turn = owed ? 0 : 1; turn <= kPriorities; ++turn) {
    auto& queue = ready_[turn == 0 ? last : turn - 1];
    while (!queue.empty()) {  // bounded: every turn but the last takes a job off
      Job* job = queue.front();
      if ((job->cancel || stop_) && !job->done) abandon(job, kCancelled);
      if (job->next_command < job->n_commands && may_issue(job)) return job;
      queue.pop_front();
      if (job->next_command < job->n_commands) {
        job->blocked_ns = now_ns();
        blocked_.push_back(job);
      }
      maybe_release(job);
    }
  }
  return nullptr;
}

bool Engine::issue(u64 now) {
  bool any = false;
  while (inflight_ < inflight_max_ && finished_.size() < 2 * qp_->depth) {
    Job* job = next_job();
    if (job == nullptr) break;
    if (!issue_one(job, now)) break;
    any = true;
  }
  return any;
}

bool Engine::issue_one(Job* job, u64 now) {
  const u32 cid = cid_acquire(qp_);
  if (cid == kNoCid) return false;
  const Iocb& io = job->config.iocb;
  Command command;
  command.job = job;
  command.layer = static_cast<u32>(job->next_command / io.n_runs);
  command.run = static_cast<u32>(job->next_command % io.n_runs);
  command.deadline_ns = now + job->config.timeout_ns;
  ++job->next_command;
  const u64 list = lists_ + static_cast<u64>(cid) * list_nbytes_;
  Sqe sqe;
  const u32 status = iocb_build(io, job->runs[command.run], command.layer, cid,
                                ListMemory{list, list, list_nbytes_}, &sqe);
  ++job->outstanding;
  if (status != kOk) {
    cid_release(qp_, cid);
    finished_.emplace_back(job, Completed{command.layer, command.run, status});
    return true;
  }
  commands_[cid] = command;
  active_.push_back(cid);
  ++inflight_;
  inflight_late_ += job->config.priority >= kPriorities - 1;
  ++stats_[kCommands];
  if (moves_pages(io)) {
    const u64 nbytes = static_cast<u64>(job->runs[command.run].nlb) << io.lba_shift;
    stats_[io.opcode == kRead ? kBytesRead : kBytesWritten] += nbytes;
  }
  sq_enqueue(qp_, sqe);
  return true;
}

void Engine::reap() {
  u32 reaped = 0;
  while (reaped < qp_->depth) {
    const u32 n = cq_reap<WordDoorbell>(qp_, 32);
    if (n == 0) break;
    reaped += n;
  }
  if (reaped == 0) return;
  size_t kept = 0;
  for (u32 cid : active_) {
    const u32 word = completion(qp_, cid);
    if (word == 0) {
      active_[kept++] = cid;
      continue;
    }
    const Command command = commands_[cid];
    commands_[cid] = Command{};
    cid_release(qp_, cid);
    --inflight_;
    inflight_late_ -= command.job->config.priority >= kPriorities - 1;
    finished_.emplace_back(command.job, Completed{command.layer, command.run, word & ~kCompleted});
  }
  active_.resize(kept);
}

// A late command fails its job at once, so that its waiters wake; the CID and all memory
// stay owned until the CQE comes or the controller was reset.
void Engine::check_deadlines(u64 now) {
  u32 late = 0;
  for (u32 cid : active_) {
    Command& command = commands_[cid];
    if (now < command.deadline_ns) continue;
    ++late;
    controller_->late(*qp_, cid, command.deadline_ns);
    if (command.timed_out) continue;
    command.timed_out = true;
    ++stats_[kTimeouts];
    if (!command.job->done) abandon(command.job, kTimedOut);
  }
  if (late < inflight_max_) return;
  for (auto& queue : ready_) {              // the controller is stuck: nothing queued can be issued
    while (Job* job = queue.pop_front()) {  // bounded by the queue
      if (!job->done) abandon(job, kTimedOut);
      maybe_release(job);
    }
  }
}

// One command ended.  Its digests are looked at once the gate is open.
void Engine::finish(Job* job, const Completed& completed) {
  if (!job->gate && !job->done) {
    job->deferred.push_back(completed);
    return;
  }
  --job->outstanding;
  if (!job->done) {
    if (completed.status != kOk) {
      mark_pages(job, job->runs[completed.run], completed.status);
    } else if (job->config.digest != kDigestNone) {
      const u64 start = now_ns();
      digest_slices(job, completed);
      stats_[kDigest] += now_ns() - start;
    }
    --job->layer_left[completed.layer];
    advance(job);
  }
  maybe_release(job);
}

void Engine::digest_slices(Job* job, const Completed& completed) {
  const Iocb& io = job->config.iocb;
  const Run& run = job->runs[completed.run];
  u32 left = run.nlb;
  u32 skip_nlb = run.skip >> io.lba_shift;
  for (u32 i = run.first; left != 0; ++i) {
    const u32 covered = std::min(left, io.slice_nlb - skip_nlb);
    left -= covered;
    skip_nlb = 0;
    if (!job->whole_slices) {
      u32& slice = job->slice_left[static_cast<size_t>(completed.layer) * io.n_pages + i];
      slice -= covered;
      if (slice != 0) continue;
    }
    digest_slice(job, completed.layer, i);
  }
}

void Engine::digest_slice(Job* job, u32 layer, u32 page_index) {
  const Iocb& io = job->config.iocb;
  const u64 page = at<u32>(io.pages)[page_index];
  tutti::Segment segments[kSegmentsMax];
  for (u32 k = 0; k < io.n_segments; ++k) {
    const u64 base = at<u64>(io.bases)[static_cast<size_t>(layer) * io.n_segments + k];
    segments[k] = {at<const uint8_t>(base + page * io.segment_stride[k]), io.segment_nbytes[k]};
  }
  const u64 digest = tutti::xxh3_segments(segments, io.n_segments);
  u64* expected =
      at<u64>(job->config.digests) + static_cast<size_t>(page_index) * job->n_layers + layer;
  if (job->config.digest == kDigestCompute) {
    *expected = digest;
  } else if (*expected != digest) {
    Run one{0, 0, io.slice_nlb, page_index, 0};
    mark_pages(job, one, kDigestMismatch);
  }
}

void Engine::mark_pages(Job* job, const Run& run, u32 status) {
  u32 none = 0;
  job->status.compare_exchange_strong(none, status);  // pairs with gio_job_report's load
  const Iocb& io = job->config.iocb;
  if (!moves_pages(io) || job->config.page_status == 0) return;
  const u32 blocks = (run.skip >> io.lba_shift) + run.nlb;
  const u32 slices = (blocks + io.slice_nlb - 1) / io.slice_nlb;
  u32* page_status = at<u32>(job->config.page_status);
  for (u32 i = run.first; i < run.first + slices && i < io.n_pages; ++i) {
    if (page_status[i] == 0) page_status[i] = status;
  }
}

// Moves the watermark over every finished layer.
void Engine::advance(Job* job) {
  u32 ready = job->layers_ready;
  while (ready < job->n_layers && job->layer_left[ready] == 0) ++ready;
  if (ready == job->layers_ready && ready != job->n_layers) return;
  tell_layers(job, job->layers_ready, ready);
  if (ready == job->n_layers) {
    job->done_ns = now_ns();
    job->done = true;
  }
  job->layers_ready = ready;
  notify();
}

// Gives up on a job: its waiters are released, and every page that has no status yet gets this
// one, because no page of a job is whole before its last layer.
void Engine::abandon(Job* job, u32 status) {
  u32 none = 0;
  job->status.compare_exchange_strong(none, status);  // pairs with gio_job_report's load
  const Iocb& io = job->config.iocb;
  if (moves_pages(io) && job->config.page_status != 0) {
    u32* page_status = at<u32>(job->config.page_status);
    for (u32 i = 0; i < io.n_pages; ++i) {
      if (page_status[i] == 0) page_status[i] = status;
    }
  }
  job->next_command = job->n_commands;
  job->gate = true;
  gate_opened_ = true;
  tell_layers(job, job->layers_ready, job->n_layers);
  job->done_ns = now_ns();
  job->done = true;
  notify();
}

void Engine::maybe_release(Job* job) {
  if (!job->done || job->outstanding != 0 || job->queued) return;
  if (job->next_command < job->n_commands) return;
  if (blocked_.contains(job)) return;
  for (auto& queue : ready_) {
    if (queue.contains(job)) queue.remove(job);
  }
  if (gated_.contains(job)) gated_.remove(job);
  job->queued = true;
  stats_[kCpu] = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  std::lock_guard<std::mutex> lock(mutex_);
  job->released = true;
  released_.push_back(job);
  changed_.notify_all();
}

void Engine::run_gates() {
  Job* next = gated_.front();
  while (Job* job = next) {  // bounded by the list: what is done here lists no other job
    next = gated_.after(job);
    if ((job->cancel || stop_) && !job->done) abandon(job, kCancelled);
    if (!job->gate) continue;
    gated_.remove(job);
    std::vector<Completed> deferred;
    deferred.swap(job->deferred);
    for (const Completed& completed : deferred) finish(job, completed);
  }
}

void Engine::notify() {
  if (waiters_ == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

}  // namespace gio

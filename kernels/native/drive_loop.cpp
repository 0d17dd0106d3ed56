// One drive's thread: issues commands in order of due times, rings the queue pair and reaps.
#include "drive_loop.h"

#include <algorithm>

namespace gio {
namespace {

constexpr u64 kTickNs = 20'000'000;          // how often deadlines are looked at
constexpr u64 kIdleNs = 200'000'000;         // a sleeping thread wakes this often by itself
constexpr u32 kShare = 8;                    // of the window is owed to stores, one part in so many
constexpr u64 kDefaultRate = 1'000'000'000;  // before a drive was measured
constexpr u64 kAheadNs = 1'000'000'000;      // how much later what nothing waits for is due
constexpr u64 kShortNbytes = 1 << 20;        // of a load whose layers are issued all at once, and
                                             // of commands that may end at about the same time
constexpr u64 kBurstNbytes = 512 << 10;      // that are issued before something urgent is hashed
constexpr u32 kOpenings = 31;  // loads that find the drive idle: in one, a command is alone

}  // namespace

ServiceThread::ServiceThread(Engine* engine, const ServiceThreadConfig& config, u32 list_nbytes,
                             u64 window_nbytes)
    : engine_(engine),
      controller_(at<Controller>(config.controller)),
      qp_(at<QueuePair>(config.queue_pair)),
      lists_(config.lists),
      list_nbytes_(list_nbytes),
      fixed_window_(window_nbytes),
      commands_(qp_->depth) {
  active_.reserve(qp_->depth);
  // issue() stops at twice the depth; a turn and a reset can each add all commands in flight.
  finished_.reserve(4 * qp_->depth);
  to_digest_.reserve(4 * qp_->depth);
  start_windows();
}

ServiceThread::~ServiceThread() { join(); }

void ServiceThread::start() {
  thread_ = std::thread([this] { loop(); });
}

void ServiceThread::push(std::list<Part>* part) {
  incoming_.splice(incoming_.end(), *part);
  // This thread itself, which has ended a job that others follow, looks before it sleeps.
  if (thread_.get_id() != std::this_thread::get_id()) controller_->wake();
}

void ServiceThread::want_reset(u64 timeout_ns) {
  reset_wanted_ = true;
  reset_timeout_ns_ = timeout_ns;
  controller_->wake();
}

// Ends after stop() when no command is left; each turn is bounded by kIdleNs.
void ServiceThread::loop() {
  u64 now = monotonic_ns();
  while (must_run()) {
    const u64 clock_ns = controller_->clock_ns(now);
    accept();
    if (issue(now, clock_ns)) sq_ring<WordDoorbell>(qp_);
    const bool busy = !finished_.empty() || !to_digest_.empty() || shares_ || !is_attended_;
    const u64 idle_ns = active_.empty() ? kIdleNs : kTickNs;
    controller_->service(busy ? 0 : blocked_.empty() ? idle_ns : mover_ns_);
    help();
    for (const Finished& f : to_digest_) digest_command(f.part, f.completed);
    to_digest_.clear();
    now = monotonic_ns();
    const bool yields = hashes_urgently();
    for (const Finished& f : finished_) finish(f.part, f.completed);
    finished_.clear();
    help();
    if (yields) std::this_thread::yield();  // the consumer may have woken up on this processor
    if (!is_attended_.exchange(true)) run_attention();  // pairs with attend
    reap(controller_->clock_ns(now));
    run_blocked(now);
    if (shares_ && !helps_ && finished_.empty()) shares_ = hash_piece();
    if (now >= next_check_ns_) {
      check_deadlines(now);
      stats_[kCpu] = thread_cpu_ns();
      next_check_ns_ = now + kTickNs;
    }
  }
  controller_->unclaim();
  engine_->thread_ended();
}

bool ServiceThread::must_run() {
  std::unique_lock<std::mutex> lock(engine_->mutex_);
  if (reset_wanted_) {
    lock.unlock();
    const int result = controller_->reset(reset_timeout_ns_);
    reap(controller_->clock_ns(monotonic_ns()));
    lock.lock();
    reset_result_ = result;
    reset_wanted_ = false;
    engine_->changed_.notify_all();
  }
  return !(engine_->stop_ && incoming_.empty() && parts_.empty());
}

void ServiceThread::accept() {
  std::list<Part> arrived;
  {
    std::lock_guard<std::mutex> lock(engine_->mutex_);
    arrived.swap(incoming_);
  }
  while (!arrived.empty()) {  // bounded by what was submitted
    Part* part = &arrived.front();
    part->itself = arrived.begin();
    part->order = ++order_;
    parts_.splice(parts_.end(), arrived, part->itself);
    if (part->job->cancel || engine_->stop_) is_attended_ = false;  // it was too late for that look
    list(part);
  }
}

// Sets a load's due times: its next layer is due now, the others at the drive's rate.  A load that
// nothing waits for is due later, so that it goes after all others, but is not starved.
void ServiceThread::begin_load(Part* part, u64 clock_ns) {
  const JobConfig& config = part->job->config;
  const u64 layer_nbytes = static_cast<u64>(config.iocb.n_pages) * config.iocb.slice_nlb
                           << config.iocb.lba_shift;
  const u64 nbytes = part->layer_nbytes = layer_nbytes * part->n_runs / config.iocb.n_runs;
  const u64 rate = std::max(window_of(kind_of_direction_[0]).rate(), kDefaultRate / 10);
  part->has_begun = true;
  part->group_until_ns = clock_ns + kOpeningNs;
  part->interval_ns = nbytes * 1000 / (rate / 1'000'000);
  const u64 past_ns = part->next / part->n_runs * part->interval_ns;
  part->is_ahead = part->job->ahead;
  part->due_ns = clock_ns - std::min(clock_ns, past_ns) + (part->is_ahead ? kAheadNs : 0);
  part->is_due = !part->is_ahead && part->job->n_layers > 1;
  const bool is_long = nbytes * part->job->n_layers > kShortNbytes;
  if (is_long && part->is_due && loads_due_ == 0 && active_.empty()) {
    opening_ = part, opening_ns_ = clock_ns, opening_nbytes_ = 0;
    opening_end_ns_ = monotonic_ns() + kOpeningNs;
    opening_rate_ -= opening_rate_ / kOpenings;  // the most, but a drive may become slower
    wants_alone_ = n_openings_++ % kOpenings == 0;
  }
  if (part->is_due && loads_due_++ == 0) interrupt(kind_);
}

void ServiceThread::end_due(Part* part) {
  if (part->is_due && --loads_due_ == 0) interrupt(kind_);
  part->is_due = false;
}

// Inserts a part with commands to issue by the due time of its next layer.  A held load may be
// granted before or after it arrives here, and begins when it is granted.
void ServiceThread::list(Part* part) {
  const u32 priority = std::min<u32>(part->job->config.priority, kStores);
  const u64 layer = part->next / part->n_runs;
  u64 due_ns = 0;
  if (priority == kLoads) {
    const bool begins = !part->has_begun && is_granted(*part);
    if (begins || (part->is_ahead && !part->job->ahead)) begin_load(part, clock_ns());
    due_ns = part->due_ns + layer * part->interval_ns;
    if (layer + 1 >= part->job->n_layers) end_due(part);
  }
  part->place.value() = {due_ns, part->order, part};
  ready_[priority].insert(std::move(part->place));
}

// The part whose next command is due first.  Priorities go in ascending order, but a share of the
// window belongs to the last one, so that loads do not starve stores.
Part* ServiceThread::pick() {
  const u64 share = window(kKinds - 1) / kShare;
  const bool owed = !ready_[kStores].empty() && inflight_late_ < share &&
                    !begins_slowly(*ready_[kStores].begin()->part);
  for (u32 turn = owed ? 0 : 1; turn <= kPriorities; ++turn) {
    Part::Turns& ready = ready_[turn == 0 ? kStores : turn - 1];
    while (!ready.empty()) {  // bounded: every turn but the last takes a part off
      Part* part = ready.begin()->part;
      if (!part->job->done && part->next < part->n_commands && may_issue(*part)) return part;
      part->place = ready.extract(ready.begin());
      if (!part->job->done && part->next < part->n_commands) {
        part->blocked_ns = monotonic_ns();
        part->place.value().due_ns = 0;
        (is_granted(*part) ? blocked_ : held_).insert(std::move(part->place));
      } else {
        maybe_drop(part);
      }
    }
  }
  return nullptr;
}

bool ServiceThread::issue(u64 now, u64 clock_ns) {
  bool any = false;
  is_full_ = waits_for_group_ = is_slow_ = false;
  u64 left_nbytes = hashes_urgently() ? kBurstNbytes : ~u64{0};
  while (finished_.size() < 2 * qp_->depth) {
    waits_for_group_ = left_nbytes == 0;
    if (waits_for_group_) break;
    Part* part = pick();
    if (part == nullptr) {
      interrupt(kind_);
      break;
    }
    const Job& job = *part->job;
    const u32 run_index = static_cast<u32>(part->next % part->n_runs);
    const u32 run = part->runs.empty() ? run_index : part->runs[run_index];
    const Iocb& io = job.config.iocb;
    const u64 nbytes = job.has_pages ? static_cast<u64>(job.runs[run].nlb) << io.lba_shift : 0;
    const u32 kind = nbytes == 0 ? kind_ : kind_of(io.opcode, nbytes);
    const u32 cid = is_full(part, kind, nbytes) ? kNoCid : cid_acquire(qp_);
    is_full_ = cid == kNoCid;
    if (is_full_) break;
    Command command;
    command.part = part;
    command.layer = static_cast<u32>(part->next / part->n_runs);
    command.run = run;
    command.nbytes = nbytes;
    command.kind = kind;
    command.issued_ns = clock_ns;
    command.deadline_ns = now + job.config.timeout_ns;
    any = send(cid, command) || any;
    left_nbytes -= std::min(left_nbytes, nbytes);
    if (run_index + 1 == part->n_runs) relist(part);
  }
  return any;
}

// Whether a consumer waits for digests that this thread computes, once the drive is busy.
bool ServiceThread::hashes_urgently() const {
  if (helps_ || finished_.empty()) return helps_;
  const Finished& first = finished_.front();
  return first.part->job->is_urgent(first.completed.layer);
}

// Inserts a part again, with the due time of its next layer.
void ServiceThread::relist(Part* part) {
  Part::Turns& ready = ready_[std::min<u32>(part->job->config.priority, kStores)];
  part->place = ready.extract(ready.begin());
  if (part->next < part->n_commands) {
    list(part);
  } else {
    maybe_drop(part);
  }
}

bool ServiceThread::send(u32 cid, const Command& command) {
  Part* part = command.part;
  const JobConfig& config = part->job->config;
  const u64 list = lists_ + static_cast<u64>(cid) * list_nbytes_;
  Sqe sqe;
  const u32 status = iocb_build(config.iocb, part->job->runs[command.run], command.layer, cid,
                                ListMemory{list, list, list_nbytes_}, &sqe);
  if (part->next++ == 0) part->from_idle = active_.empty();
  ++part->outstanding;
  if (part->job->digests_early) {  // once the drive has it
    to_digest_.push_back({part, {command.layer, command.run, kOk}});
  }
  if (status != kOk) {
    cid_release(qp_, cid);
    finished_.push_back({part, {command.layer, command.run, status}});
    return false;
  }
  sqe.nsid = engine_->local_nsid(sqe.nsid);
  if (command.nbytes != 0 && command.kind != kind_) {  // rates of a mixture say nothing
    interrupt(kind_);
    interrupt(command.kind);
    kind_ = kind_of_direction_[command.kind / kSizes] = command.kind;
  }
  commands_[cid] = command;
  commands_[cid].is_alone = active_.empty();
  if (active_.size() == 1) commands_[active_.front()].is_alone = false;
  active_.push_back(cid);
  ++part->in_flight;
  inflight_nbytes_ += command.nbytes;
  if (config.priority >= kStores) inflight_late_ += command.nbytes;
  count(kCommands, 1);
  if (command.nbytes != 0) {
    count(config.iocb.opcode == kRead ? kBytesRead : kBytesWritten, command.nbytes);
  }
  sq_enqueue(qp_, sqe);
  return true;
}

void ServiceThread::reap(u64 clock_ns) {
  u32 reaped = 0;
  while (reaped < qp_->depth) {
    const u32 n = cq_reap<WordDoorbell>(qp_, 32);
    if (n == 0) break;
    reaped += n;
  }
  if (reaped == 0) return;
  const bool is_long = active_.size() > 1 && inflight_nbytes_ >= kShortNbytes;
  size_t kept = 0;
  for (u32 cid : active_) {
    const u32 word = completion(qp_, cid);
    if (word == 0) {
      active_[kept++] = cid;
      continue;
    }
    const Command command = commands_[cid];
    if (command.timed_out) controller_->late_ended(*qp_, cid);
    cid_release(qp_, cid);
    --command.part->in_flight;
    inflight_nbytes_ -= command.nbytes;
    if (command.part->job->config.priority >= kStores) inflight_late_ -= command.nbytes;
    const Completed completed = {command.layer, command.run, word & ~kCompleted};
    measure(command, completed.status, clock_ns);
    const Job& job = *command.part->job;
    // A worker can begin with what is urgent, or wake up, while this thread issues commands.
    const bool is_shared = job.is_urgent(command.layer) && command.nbytes >= kAloneNbytes;
    if (job.config.digest == kDigestNone || (is_shared && engine_->has_workers())) {
      finish(command.part, completed);
    } else {  // once the drive has its next commands
      finished_.push_back({command.part, completed});
    }
  }
  if (is_long && kept < active_.size()) {
    together_ = together_ - together_ / 8 + (kept == 0 ? kAlways / 8 : 0);
  }
  active_.resize(kept);
  publish_windows();
}

void ServiceThread::add_stats(EngineStats* stats) const {
  stats->commands += stats_[kCommands];
  stats->bytes_read += stats_[kBytesRead];
  stats->bytes_written += stats_[kBytesWritten];
  stats->timeouts += stats_[kTimeouts];
  stats->thread_cpu_ns += stats_[kCpu];
}

// Fails the jobs of late commands at once, so that their waiters wake; the CID and all memory
// stay owned until the CQE comes or the controller was reset.
void ServiceThread::check_deadlines(u64 now) {
  for (const Part::Turn& turn : held_) {  // a submitter that is stuck costs time, not service
    Job* job = turn.part->job;
    if (now < turn.part->blocked_ns + job->config.timeout_ns) continue;
    job->granted = job->n_layers;
    is_attended_ = false;
  }
  size_t late = 0;
  for (u32 cid : active_) {
    Command& command = commands_[cid];
    if (now < command.deadline_ns) continue;
    ++late;
    controller_->late(*qp_, cid, command.deadline_ns);
    if (command.timed_out) continue;
    command.timed_out = true;
    count(kTimeouts, 1);
    engine_->abandon(command.part->job, kTimedOut);
  }
  if (opening_ != nullptr && (late != 0 || now >= opening_end_ns_)) {
    opening_ = nullptr;  // the others go on
    return;
  }
  if (late == 0 || late < active_.size() || !is_full_ || waits_for_group_) return;
  for (const auto& ready : ready_) {  // the drive is stuck: nothing queued can be issued
    for (const Part::Turn& turn : ready) engine_->abandon(turn.part->job, kTimedOut);
  }
}

// Handles the end of a command.  Its digests are compared once the gate is open.
void ServiceThread::finish(Part* part, const Completed& completed) {
  Job* job = part->job;
  if (!job->gate && !job->done) {
    part->deferred.push_back(completed);
    return;
  }
  --part->outstanding;
  if (!job->done) {
    const Run& run = job->runs[completed.run];
    if (completed.status != kOk) {
      const u32 end = run.first + (job->has_pages ? run_slices(job->config.iocb, run) : 0);
      // A drive does not report that its queues were deleted because of a close.
      const bool is_closed = engine_->stop_ && completed.status == kAbortedSqDeletion;
      engine_->mark_pages(job, run.first, end, is_closed ? kCancelled : completed.status);
    }
    const bool has_digests = job->config.digest != kDigestNone && !job->digests_early;
    if (completed.status == kOk && has_digests) {
      digest_command(part, completed);
    } else {
      engine_->layer_command_ended(job, completed.layer);
    }
  }
  maybe_drop(part);
}

// Handles flags of jobs: ends cancelled ones, continues those whose gate was opened, and removes
// parts of jobs that are done.
void ServiceThread::run_attention() {
  for (Part& part : parts_) {
    Job* job = part.job;
    const bool is_unfinished = part.next < part.n_commands || !job->gate;
    if ((job->cancel || engine_->stop_) && is_unfinished) engine_->abandon(job, kCancelled);
  }
  for (Part::Turns& ready : ready_) {
    for (auto turn = ready.begin(); turn != ready.end();) {
      const auto here = turn++;
      Part* part = here->part;
      const bool is_waited = part->is_ahead && !part->job->ahead;
      if (!part->job->done && !is_waited) continue;
      part->place = ready.extract(here);
      if (!part->job->done) list(part);
    }
  }
  list_granted();
  for (auto next = parts_.begin(); next != parts_.end();) {
    Part* part = &*next++;  // what follows ends no other part
    if (part->deferred.empty()) {
      maybe_drop(part);
    } else if (part->job->gate) {
      std::vector<Completed> deferred;
      deferred.swap(part->deferred);
      for (const Completed& completed : deferred) finish(part, completed);
    }
  }
}

// Continues held parts that were granted more layers.
void ServiceThread::list_granted() {
  for (auto turn = held_.begin(); turn != held_.end();) {
    const auto here = turn++;
    Part* part = here->part;
    if (!part->job->done && !is_granted(*part)) continue;
    part->place = held_.extract(here);
    if (!part->job->done) list(part);
  }
}

// Drops a part if all of its commands were issued, or never will be, and have ended.
void ServiceThread::maybe_drop(Part* part) {
  Job* job = part->job;
  if (part->place.empty() || part->outstanding != 0) return;  // listed, or in flight
  if (part->next < part->n_commands && !job->done) return;
  end_due(part);
  if (opening_ == part) opening_ = nullptr;
  parts_.erase(part->itself);
  stats_[kCpu] = thread_cpu_ns();
  engine_->drop(job);
}

}  // namespace gio

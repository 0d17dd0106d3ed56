#include "controller_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>

#include "no_throw.h"

namespace gio {

namespace {

constexpr u32 kBatch = 64;   // commands of one queue in one turn
constexpr u32 kSpins = 200;  // looks at the doorbells before sleeping
constexpr u64 kSecondNs = 1'000'000'000;

void relax() { __builtin_ia32_pause(); }

}  // namespace

MemoryController::MemoryController(const MemoryConfig& config) : config_(config) {
  const u64* sizes = at<u64>(config.namespace_nlb);
  namespace_nlb_.assign(sizes, sizes + config.namespaces);
  info.lba_shift = config.lba_shift;
  info.namespaces = config.namespaces;
  info.mdts_nbytes = config.mdts_nbytes;
  info.sgl_descriptors = config.sgl_descriptors;
  info.depth_max = config.depth_max;
  info.flags = kHasFua | kHasDeallocate | kHasPrp;
  if (config.write_back != 0) info.flags |= kHasVolatileCache;
  channel_until_ns_.resize(config.channels, 0);
}

MemoryController::~MemoryController() {
  for (size_t i = 0; i < medium_.size(); ++i) {
    munmap(medium_[i], namespace_nlb_[i] << config_.lba_shift);
  }
}

int MemoryController::map_medium() {
  for (const u64 nlb : namespace_nlb_) {
    const u64 nbytes = nlb << config_.lba_shift;
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return -ENOMEM;
    madvise(memory, nbytes, MADV_HUGEPAGE);  // a refusal costs speed alone
    medium_.push_back(static_cast<u8*>(memory));
  }
  return 0;
}

u32 MemoryController::service(u64 timeout_ns) {
  const u32 posted = turn();
  if (posted != 0 || timeout_ns == 0) return posted;
  for (u32 i = 0; i < kSpins; ++i) {
    if (is_rung()) return turn();
    relax();
  }
  {
    std::unique_lock<std::mutex> lock(wake_mutex_);
    woken_.wait_for(lock, std::chrono::nanoseconds(sleep_limit(timeout_ns)),
                    [this] { return is_woken_; });
    is_woken_ = false;
  }
  return turn();
}

void MemoryController::wake() {
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    is_woken_ = true;
  }
  woken_.notify_all();
}

// Whether a turn would find work.  Called by the serving thread.
bool MemoryController::is_rung() const {
  if (has_held_) return true;
  for (const ControllerQueue& queue : queues_) {
    // Pairs with WordDoorbell::ring of the submission queue.
    if (load_acquire(at<u32>(queue.sq_doorbell)) != queue.sq_tail) return true;
  }
  return false;
}

u32 MemoryController::turn() {
  take_changes();
  std::lock_guard<std::mutex> lock(mutex_);
  ++turn_;
  outstanding_.resize(queues_.size(), 0);
  u32 posted = post_backlog();
  MemoryMap::Reader reader(memory);
  for (u32 i = 0; i < queues_.size(); ++i) posted += serve(i, &reader);
  if (!held_.empty()) posted += run_held(&reader);
  has_held_ = !held_.empty();
  return posted;
}

// Fetches and executes one batch of a queue, then posts its answers together.  A queue with
// answers in the backlog is not served, and no queue has more than `depth` commands outstanding, so
// that a faulty submitter takes bounded memory.
u32 MemoryController::serve(u32 index, MemoryMap::Reader* reader) {
  ControllerQueue* queue = &queues_[index];
  if (has_backlog(index)) return 0;
  Answer answers[kBatch];
  u32 n = 0;
  Sqe sqe;
  for (u32 i = 0; i < kBatch && outstanding_[index] < queue->depth; ++i) {
    if (!sq_fetch(queue, &sqe)) break;
    __builtin_prefetch(&at<Sqe>(queue->sq)[(queue->sq_head + 2) & (queue->depth - 1)]);
    ++outstanding_[index];
    ++stats_.commands;
    if (trace_left_ != 0) {
      --trace_left_;
      *trace_++ = sqe_opcode(sqe);
      *trace_++ = sqe_slba(sqe);
    }
    if (accept(index, sqe, &answers[n], reader)) ++n;
  }
  u32 posted = 0;
  for (u32 i = 0; i < n; ++i) posted += answer(answers[i]);
  return posted;
}

// True if the command was executed and `answer` is due; false if it is held back.
bool MemoryController::accept(u32 index, const Sqe& sqe, Answer* answer,
                              MemoryMap::Reader* reader) {
  Verdict verdict;
  if (faults_.is_active()) {
    verdict = faults_.judge(sqe);
    const bool is_sound = verdict.status == kOk && !verdict.is_lost && !verdict.is_held &&
                          !verdict.is_unanswered && verdict.percent == 100;
    if (!is_sound) ++stats_.faults;
  }
  if (verdict.is_unanswered || verdict.is_held || config_.mode == kModeVirtual) {
    hold(index, sqe, verdict);
    return false;
  }
  *answer = {index, sqe_cid(sqe), execute(sqe, verdict, reader)};
  return true;
}

void MemoryController::hold(u32 index, const Sqe& sqe, const Verdict& verdict) {
  const u64 due_ns = config_.mode == kModeVirtual ? virtual_due_ns(sqe) : 0;
  const u64 order = verdict.order != 0 ? verdict.order : stats_.commands;
  const Held held = {sqe, index, verdict, turn_ + verdict.delay_turns, due_ns, order};
  if (config_.is_shared != 0) {
    for (Held& other : held_) other.due_ns = std::max(other.due_ns, due_ns);
  }
  (verdict.is_unanswered ? unanswered_ : held_).push_back(held);
}

// The end of a transfer that starts now.  Each direction is a pipe with its bandwidth; while both
// are busy, everything takes interference_percent of its time.
u64 MemoryController::virtual_due_ns(const Sqe& sqe) {
  const u32 opcode = sqe_opcode(sqe);
  if (opcode != kRead && opcode != kWrite) return now_ns_ + config_.latency_ns;
  const u32 direction = opcode == kRead ? 0 : 1;
  const u64 bandwidth = direction == 0 ? config_.read_bandwidth : config_.write_bandwidth;
  const u64 nbytes = static_cast<u64>(sqe_nlb(sqe)) << config_.lba_shift;
  const u64 begin_ns = std::max(now_ns_, busy_until_ns_[direction]);
  u64 duration_ns = nbytes * kSecondNs / bandwidth;
  if (config_.crowd_percent != 0 && held_.size() >= config_.crowd) {
    duration_ns = duration_ns * config_.crowd_percent / 100;
  }
  busy_until_ns_[direction] = begin_ns + duration_ns;
  slow_down(direction, begin_ns, duration_ns);
  u64 due_ns = busy_until_ns_[direction];
  if (!channel_until_ns_.empty()) {  // the one that is free first
    u64& until_ns = *std::min_element(channel_until_ns_.begin(), channel_until_ns_.end());
    until_ns = std::max(now_ns_, until_ns) + nbytes * kSecondNs / config_.channel_bandwidth;
    due_ns = std::max(due_ns, until_ns);
  }
  return due_ns + config_.latency_ns;
}

// Delays transfers in both directions by the time in which a new transfer, of `duration_ns` alone,
// runs at the same time as those of the other direction.
void MemoryController::slow_down(u32 direction, u64 begin_ns, u64 duration_ns) {
  u64& other_until_ns = busy_until_ns_[1 - direction];
  if (other_until_ns <= begin_ns) return;
  const auto longer = [&](u64 both_ns) {
    return std::min(both_ns, duration_ns) * (config_.interference_percent - 100) / 100;
  };
  for (Held& other : held_) {
    const u64 end_ns = other.due_ns - std::min(other.due_ns, config_.latency_ns);
    const bool is_other = sqe_opcode(other.sqe) == (direction == 0 ? kWrite : kRead);
    if (is_other && end_ns > begin_ns) other.due_ns += longer(end_ns - begin_ns);
  }
  busy_until_ns_[direction] += longer(other_until_ns - begin_ns);
  other_until_ns += longer(other_until_ns - begin_ns);
}

// Executes the commands that are due.  A virtual clock first moves to the next due time, up to the
// limit.
u32 MemoryController::run_held(MemoryMap::Reader* reader) {
  if (config_.mode == kModeVirtual) {
    u64 next_ns = std::numeric_limits<u64>::max();
    for (const Held& held : held_) {
      if (held.due_turn <= turn_) next_ns = std::min(next_ns, held.due_ns);
    }
    if (next_ns != std::numeric_limits<u64>::max()) {
      now_ns_ = std::max(now_ns_, std::min(next_ns, limit_ns_));
    }
  }
  const auto is_waiting = [this](const Held& held) {
    return held.due_turn > turn_ || held.due_ns > now_ns_;
  };
  const auto due = std::stable_partition(held_.begin(), held_.end(), is_waiting);
  std::sort(due, held_.end(), [](const Held& a, const Held& b) {
    return a.due_ns != b.due_ns ? a.due_ns < b.due_ns : a.order < b.order;
  });
  u32 posted = 0;
  for (auto held = due; held != held_.end(); ++held) {
    const u32 status = execute(held->sqe, held->verdict, reader);
    posted += answer({held->queue, sqe_cid(held->sqe), status});
  }
  held_.erase(due, held_.end());
  return posted;
}

u32 MemoryController::answer(const Answer& answer) {
  if (!post(answer.queue, answer.cid, answer.status)) {
    backlog_.push_back(answer);
    return 0;
  }
  --outstanding_[answer.queue];
  ++stats_.completed;
  return 1;
}

bool MemoryController::has_backlog(u32 queue) const {
  const auto is_of = [queue](const Answer& answer) { return answer.queue == queue; };
  return std::any_of(backlog_.begin(), backlog_.end(), is_of);
}

u32 MemoryController::post_backlog() {
  u32 posted = 0;
  for (size_t left = backlog_.size(); left != 0; --left) {
    const Answer oldest = backlog_.front();
    backlog_.pop_front();
    posted += answer(oldest);
  }
  return posted;
}

u32 MemoryController::execute(const Sqe& sqe, const Verdict& verdict, MemoryMap::Reader* reader) {
  const u32 status = validate(sqe);
  if (status != kOk) return status;
  if (verdict.status != kOk && verdict.percent == 100) return verdict.status;
  if (sqe_opcode(sqe) == kFlush) {
    cache_.flush(sqe.nsid);
    return kOk;
  }
  if (sqe_opcode(sqe) == kDatasetManagement) return deallocate(sqe, reader);
  return transfer(sqe, verdict, reader);
}

u32 MemoryController::transfer(const Sqe& sqe, const Verdict& verdict, MemoryMap::Reader* reader) {
  const u64 nlb = sqe_nlb(sqe);
  const bool is_write = sqe_opcode(sqe) == kWrite;
  const u32 status =
      decode_data_pointer(sqe, nlb << config_.lba_shift, info.sgl_descriptors, reader, &extents_);
  if (status != kOk) return status;
  if (verdict.is_lost) return kOk;
  u64 left = (nlb * verdict.percent / 100) << config_.lba_shift;
  (is_write ? stats_.bytes_written : stats_.bytes_read) += left;
  if (config_.mode == kModeZeroCopy) return verdict.status;
  u8* medium = medium_[sqe.nsid - 1] + (sqe_slba(sqe) << config_.lba_shift);
  if (is_write && config_.write_back != 0) {
    cache_.note(sqe.nsid, medium, left, (sqe.cdw12 & kFua) != 0);
  }
  for (const Extent& extent : extents_) {
    const u64 nbytes = std::min(extent.nbytes, left);
    if (is_write) {
      std::memcpy(medium, at<u8>(extent.address), nbytes);
    } else {
      std::memcpy(at<u8>(extent.address), medium, nbytes);
    }
    medium += nbytes;
    left -= nbytes;
  }
  return verdict.status;
}

u32 MemoryController::deallocate(const Sqe& sqe, MemoryMap::Reader* reader) {
  const u32 n = (sqe.cdw10 & 0xffu) + 1;
  u32 status =
      decode_data_pointer(sqe, n * sizeof(DsmRange), info.sgl_descriptors, reader, &extents_);
  if (status != kOk) return status;
  DsmRange ranges[kDsmRangesMax];
  u8* next = reinterpret_cast<u8*>(ranges);
  for (const Extent& extent : extents_) {
    std::memcpy(next, at<u8>(extent.address), extent.nbytes);
    next += extent.nbytes;
  }
  const u64 size_nlb = namespace_nlb(sqe.nsid);
  for (u32 i = 0; i < n; ++i) {
    const DsmRange& range = ranges[i];
    if (range.nlb > size_nlb || range.slba > size_nlb - range.nlb) return kLbaOutOfRange;
  }
  if ((sqe.cdw11 & kDsmDeallocate) == 0) return kOk;
  for (u32 i = 0; i < n; ++i) write_zeros(sqe.nsid, ranges[i].slba, ranges[i].nlb);
  return kOk;
}

// Deallocated blocks read as zeros here, which is one of the allowed behaviours.
void MemoryController::write_zeros(u32 nsid, u64 slba, u64 nlb) {
  u8* medium = medium_[nsid - 1] + (slba << config_.lba_shift);
  const u64 nbytes = nlb << config_.lba_shift;
  if (nbytes != 0 && config_.write_back != 0) cache_.note(nsid, medium, nbytes, false);
  std::memset(medium, 0, nbytes);
}

int MemoryController::reset(u64) {
  take_changes();
  std::lock_guard<std::mutex> lock(mutex_);
  if (faults_.config.reset_fails != 0 && !unanswered_.empty()) return -ETIMEDOUT;
  faults_.config.stall_from = 0;
  outstanding_.resize(queues_.size(), 0);
  post_backlog();
  for (const std::vector<Held>* list : {&held_, &unanswered_}) {
    for (const Held& held : *list) answer({held.queue, sqe_cid(held.sqe), kAbortedSqDeletion});
  }
  held_.clear();
  unanswered_.clear();
  for (u32 i = 0; i < queues_.size(); ++i) {
    Sqe sqe;
    while (outstanding_[i] < queues_[i].depth && sq_fetch(&queues_[i], &sqe)) {
      ++outstanding_[i];
      answer({i, sqe_cid(sqe), kAbortedSqDeletion});
      if (has_backlog(i)) break;  // its submitter has to reap first
    }
  }
  return backlog_.empty() ? 0 : -ETIMEDOUT;
}

u8* MemoryController::medium(u32 nsid) const {
  return nsid >= 1 && nsid <= medium_.size() ? medium_[nsid - 1] : nullptr;
}

void MemoryController::set_faults(const FaultConfig& config) {
  std::lock_guard<std::mutex> lock(mutex_);
  faults_.set(config);
}

void MemoryController::add_fault(const RangeFault& fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  faults_.add(fault);
}

void MemoryController::answer_all() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    faults_.config.stall_from = 0;
    for (Held& held : unanswered_) held.due_turn = 0;
    held_.insert(held_.end(), unanswered_.begin(), unanswered_.end());
    unanswered_.clear();
  }
  wake();
}

void MemoryController::power_cut(u64 seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  cache_.power_cut(seed, 1ull << config_.lba_shift);
}

MemoryStats MemoryController::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  MemoryStats stats = stats_;
  stats.unanswered = unanswered_.size() + held_.size();
  return stats;
}

u64 MemoryController::now_ns() {
  std::lock_guard<std::mutex> lock(mutex_);
  return now_ns_;
}

void MemoryController::advance(u64 duration_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  now_ns_ += duration_ns;
}

void MemoryController::limit(u64 limit_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ns_ = limit_ns;
}

void MemoryController::trace(u64* words, u64 n) {
  std::lock_guard<std::mutex> lock(mutex_);
  trace_ = words;
  trace_left_ = n;
}

}  // namespace gio

namespace {

gio::MemoryController* as_memory(gio::Controller* controller) {
  return static_cast<gio::MemoryController*>(controller);
}

bool is_acceptable(const gio::MemoryConfig& config) {
  if (config.namespace_nlb == 0 || config.namespaces == 0 || config.namespaces > 64) return false;
  if (config.lba_shift < 9 || config.lba_shift > 16 || config.mode > gio::kModeVirtual)
    return false;
  if (config.depth_max < 2 || config.depth_max > gio::kNlbMax) return false;
  const gio::u64 mdts_nlb = config.mdts_nbytes >> config.lba_shift;
  if (mdts_nlb == 0 || mdts_nlb > gio::kNlbMax) return false;
  for (gio::u32 i = 0; i < config.namespaces; ++i) {
    const gio::u64 nlb = gio::at<gio::u64>(config.namespace_nlb)[i];
    if (nlb == 0 || nlb > (1ull << 46) >> config.lba_shift) return false;
  }
  return config.mode != gio::kModeVirtual ||
         (config.read_bandwidth != 0 && config.write_bandwidth != 0 &&
          (config.channels == 0 || config.channel_bandwidth != 0));
}

}  // namespace

int gio_memory_controller_create(const gio::MemoryConfig* config, gio::Controller** out) {
  if (!is_acceptable(*config)) return -EINVAL;
  return gio::without_exceptions([=] {
    auto controller = std::make_unique<gio::MemoryController>(*config);
    const int status = controller->map_medium();
    if (status != 0) return status;
    *out = controller.release();  // pairs with the delete in gio_controller_destroy
    return 0;
  });
}

void* gio_memory_controller_medium(gio::Controller* controller, uint32_t nsid) {
  return as_memory(controller)->medium(nsid);
}

void gio_memory_controller_faults(gio::Controller* controller, const gio::FaultConfig* config) {
  as_memory(controller)->set_faults(*config);
}

void gio_memory_controller_fault_range(gio::Controller* controller, const gio::RangeFault* fault) {
  as_memory(controller)->add_fault(*fault);
}

// Pairs with FaultConfig::stall_from.
void gio_memory_controller_release(gio::Controller* controller) {
  as_memory(controller)->answer_all();
}

void gio_memory_controller_power_cut(gio::Controller* controller, uint64_t seed) {
  as_memory(controller)->power_cut(seed);
}

void gio_memory_controller_stats(gio::Controller* controller, gio::MemoryStats* out) {
  *out = as_memory(controller)->stats();
}

uint64_t gio_memory_controller_now_ns(gio::Controller* controller) {
  return as_memory(controller)->now_ns();
}

void gio_memory_controller_advance(gio::Controller* controller, uint64_t duration_ns) {
  as_memory(controller)->advance(duration_ns);
}

void gio_memory_controller_limit(gio::Controller* controller, uint64_t limit_ns) {
  as_memory(controller)->limit(limit_ns);
}

void gio_memory_controller_trace(gio::Controller* controller, uint64_t* words, uint64_t n) {
  as_memory(controller)->trace(reinterpret_cast<gio::u64*>(words), n);
}

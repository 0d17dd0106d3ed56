#include "controller_vfio.h"

#include <fcntl.h>
#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "no_throw.h"

#ifndef VFIO_DMA_UNMAP_FLAG_ALL
#define VFIO_DMA_UNMAP_FLAG_ALL (1 << 1)  // Linux 5.12
#endif

namespace gio {

namespace {

constexpr u32 kSpins = 100;              // looks at the queues before sleeping
constexpr u64 kNapNs = 200'000;          // where nothing ends a sleep
constexpr u64 kLookNs = 50'000'000;      // how often request_fd and, when idle, CSTS are looked at
constexpr u64 kFatalNs = 5'000'000'000;  // for the restart of a drive that reports a fatal error
constexpr u32 kAllOnes = 0xffffffffu;    // what reads of an absent PCI device return
constexpr u32 kCstsFatal = 1u << 1;      // CSTS.CFS

// For queues of a disabled drive, whose doorbells are reset as well.
struct NoDoorbell {
  static void ring(u32*, u32) {}
  static void ring_head(u32*, u32) {}
};

void drain(int fd) {
  u64 count;
  if (fd >= 0 && read(fd, &count, sizeof count) < 0) return;  // nothing was counted
}

bool has_completion(const QueuePair& qp) {
  const u32 head = load_relaxed(&qp.cq_head);
  // Pairs with the drive's write of the CQE; the thread that reaps it acquires again.
  const u32 dw3 = load_acquire(&at<Cqe>(qp.cq)[head & (qp.depth - 1)].status);
  return cqe_phase(dw3) == (((head / qp.depth) & 1u) ^ 1u);
}

bool is_free(const QueuePair& qp, u32 cid) {
  return (load_relaxed(&at<u32>(qp.cid_free)[cid / 32]) >> (cid % 32) & 1u) != 0;
}

// Whether a doorbell must be written when its shadow changed from `old` to `value`: the drive asked
// for that when it passes `event` (NVM Express Base Specification 2.0, Doorbell Buffer Config).
bool passes(u32 event, u32 value, u32 old) {
  const u16 ahead = static_cast<u16>(value - event - 1);
  return ahead < static_cast<u16>(value - old);
}

// Excludes a mapping from forked children, which would otherwise keep the device open.
void keep_from_children(u64 address, u64 nbytes) {
  madvise(at<void>(address), nbytes, MADV_DONTFORK);
}

// Replaces the mapping of the doorbells atomically, while other threads store to them.  Does not
// use libc's mmap, which the thread sanitizer treats as a write to all of it.
int replace_mapping(u64 address, u64 nbytes, int flags, int fd, u64 offset) {
  const long mapped = syscall(SYS_mmap, address, nbytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED,
                              fd, static_cast<off_t>(offset));
  if (mapped == -1) return -errno;
  keep_from_children(address, nbytes);
  return 0;
}

// Replaces a mapping by ordinary memory of zeros.
int replace_by_plain(u64 address, u64 nbytes) {
  return replace_mapping(address, nbytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

}  // namespace

VfioController::VfioController(const VfioConfig& config) : config_(config) {
  const u64* sizes = at<u64>(config.namespace_nlb);
  namespace_nlb_.assign(sizes, sizes + config.namespaces);
  info.lba_shift = config.lba_shift;
  info.namespaces = config.namespaces;
  info.mdts_nbytes = config.mdts_nbytes;
  info.sgl_descriptors = config.sgl_descriptors;
  info.flags = config.flags;
  info.depth_max = config.depth_max;
}

VfioController::~VfioController() {
  if (doorbells_ != 0) munmap(at<void>(doorbells_), config_.doorbells_nbytes);
}

int VfioController::map_doorbells() {
  void* const mapped = mmap(nullptr, config_.doorbells_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                            config_.device_fd, static_cast<off_t>(config_.doorbells));
  if (mapped == MAP_FAILED) return -errno;
  doorbells_ = reinterpret_cast<u64>(mapped);
  keep_from_children(doorbells_, config_.doorbells_nbytes);
  return 0;
}

int VfioController::attach_pair(QueuePair* qp) {
  if (is_claimed()) return -EBUSY;
  // Allocates first: the rest cannot fail, and the serving thread must not allocate.
  pairs_.reserve(pairs_.size() + 1);
  rung_.resize(2 * pairs_.size() + 2, 0);
  parked_words_.resize(rung_.size());
  late_.reserve(late_.capacity() + qp->depth);
  const int result = attach(*qp);
  if (result != 0) return result;
  take_changes();
  pairs_.push_back(qp);
  return 0;
}

u32 VfioController::service(u64 timeout_ns) {
  answer_ask();
  if (is_gone_) return refuse(timeout_ns);
  if (config_.shadow != 0 && !is_parked_) forward_shadows();
  const u64 now = monotonic_ns();
  if (now >= next_look_ns_) {
    next_look_ns_ = now + kLookNs;
    pollfd request = {config_.request_fd, POLLIN, 0};
    if (poll(&request, 1, 0) > 0) lose();
  }
  u32 n = pending();
  if (n != 0 || timeout_ns == 0) return n;
  for (u32 i = 0; i < kSpins && n == 0; ++i) {
    __builtin_ia32_pause();
    n = pending();
  }
  if (n == 0) sleep(timeout_ns);
  return is_gone_ ? refuse(0) : pending();
}

void VfioController::wake() {
  const u64 one = 1;
  if (write(config_.wake_fd, &one, sizeof one) < 0) return;  // the counter is full: it is awake
}

int VfioController::reset(u64 timeout_ns) {
  const auto restart = reinterpret_cast<int (*)(u64)>(config_.restart);
  const u64 deadline_ns = monotonic_ns() + timeout_ns;
  int result = is_gone_ ? 0 : restart(timeout_ns);
  while (result == -EBUSY && monotonic_ns() < deadline_ns) {  // a concurrent reset needs answers
    answer_ask();
    const timespec nap = {0, static_cast<long>(kNapNs)};
    nanosleep(&nap, nullptr);
    result = is_gone_ ? 0 : restart(timeout_ns);
  }
  if (is_gone_) refuse(0);
  if (result == 0 || result == -EBUSY) return result == 0 ? 0 : -ETIMEDOUT;
  return lose() == 0 ? 0 : -ETIMEDOUT;
}

void VfioController::late(const QueuePair& qp, u32 cid, u64 deadline_ns) {
  std::lock_guard<std::mutex> lock(late_mutex_);
  for (const LateCommand& known : late_) {
    if (known.qid == qp.qid && known.cid == cid) return;
  }
  if (late_.size() == late_.capacity()) return;  // it is told again when there is room
  late_.push_back({qp.qid, cid, deadline_ns});
}

void VfioController::late_ended(const QueuePair& qp, u32 cid) {
  std::lock_guard<std::mutex> lock(late_mutex_);
  late_.erase(std::remove_if(late_.begin(), late_.end(),
                             [&](const LateCommand& known) {
                               return known.qid == qp.qid && known.cid == cid;
                             }),
              late_.end());
}

u32 VfioController::late_commands(LateCommand* out, u32 max) {
  std::lock_guard<std::mutex> lock(late_mutex_);
  std::copy_n(late_.begin(), std::min<size_t>(max, late_.size()), out);
  return static_cast<u32>(late_.size());
}

// The kernel replaces the mapping atomically: other threads store to the old or the new page.
int VfioController::park() {
  if (is_gone_) return -ENODEV;
  const int result = replace_by_plain(doorbells_, config_.doorbells_nbytes);
  if (result != 0) return result;
  is_parked_ = true;
  return 0;
}

void VfioController::ask(u32 what) {
  asked_.store(what, std::memory_order_release);  // pairs with answer_ask
  wake();
}

u32 VfioController::asked() const {
  return asked_.load(std::memory_order_acquire);  // pairs with the end of answer_ask
}

void VfioController::answer_ask() {
  const u32 what = asked_.load(std::memory_order_acquire);  // pairs with ask
  if (what == kAskNothing) return;
  if (!is_gone_) {
    if (what == kAskEndAll) end_all(kAbortedSqDeletion);
    if (what == kAskLose || (what == kAskGoOn && go_on() != 0)) lose();
  }
  asked_.store(kAskNothing, std::memory_order_release);  // pairs with asked
}

// Maps the drive's doorbells again, and rings those that were rung since end_all.
int VfioController::go_on() {
  std::vector<u32>& words = parked_words_;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    for (u32 k = 0; k < 2; ++k) {
      words[2 * i + k] = load_relaxed(at<u32>(doorbells_ + doorbell_offset(i, k)));
    }
  }
  const int result = replace_mapping(doorbells_, config_.doorbells_nbytes, MAP_SHARED,
                                     config_.device_fd, config_.doorbells);
  if (result != 0) return result;
  is_parked_ = false;
  for (size_t i = 0; i < 2 * pairs_.size(); ++i) {
    const u64 offset = doorbell_offset(i / 2, static_cast<u32>(i % 2));
    if (words[i] != 0) MmioDoorbell::ring(at<u32>(doorbells_ + offset), words[i]);
  }
  return 0;
}

// Writes the registers of shadow doorbells (words in memory) if the drive asked for it.
void VfioController::forward_shadows() {
  for (size_t i = 0; i < pairs_.size(); ++i) {
    for (u32 k = 0; k < 2; ++k) {  // SQ tail, CQ head
      const u64 offset = doorbell_offset(i, k);
      // Pairs with WordDoorbell::ring: what the doorbell covers was written before it.
      const u32 value = load_acquire(at<u32>(config_.shadow + offset));
      u32* rung = &rung_[2 * i + k];
      if (value == *rung) continue;
      // Pairs with the drive's fence between its write of the event index and its read of the
      // shadow: one of the two sees the other's write.
      __atomic_thread_fence(__ATOMIC_SEQ_CST);
      const u32 event = load_relaxed(at<u32>(config_.event_index + offset));
      if (passes(event, value, *rung)) {
        MmioDoorbell::ring(at<u32>(doorbells_ + offset), value);
      }
      *rung = value;
    }
  }
}

u32 VfioController::pending() const {
  u32 n = 0;
  for (const QueuePair* qp : pairs_) n += has_completion(*qp) ? 1 : 0;
  return n;
}

void VfioController::poll_on(pollfd* fds) const {
  fds[0] = {config_.irq_fd, POLLIN, 0};
  fds[1] = {config_.request_fd, POLLIN, 0};
}

// Limits sleeps: nothing wakes the thread when a drive without interrupts answers, or a shadow
// doorbell is rung.
u64 VfioController::sleep_max(u64 timeout_ns) const {
  const bool is_silent = config_.irq_fd < 0 || config_.shadow != 0;
  return is_silent ? std::min(timeout_ns, kNapNs) : timeout_ns;
}

void VfioController::woke(const pollfd* fds) {
  if (is_gone_) return;
  if (fds[0].revents != 0) drain(config_.irq_fd);
  if (fds[1].revents != 0) lose();
  const u64 now = monotonic_ns();
  if (fds[0].revents != 0 || now < next_check_ns_) return;
  next_check_ns_ = now + kLookNs;
  check_health();
}

void VfioController::sleep(u64 timeout_ns) {
  timeout_ns = sleep_max(timeout_ns);
  pollfd fds[kPollFds + 1];
  poll_on(fds);
  fds[kPollFds] = {config_.wake_fd, POLLIN, 0};
  const timespec limit = {static_cast<time_t>(timeout_ns / 1'000'000'000u),
                          static_cast<long>(timeout_ns % 1'000'000'000u)};
  if (ppoll(fds, kPollFds + 1, &limit, nullptr) > 0) drain(config_.wake_fd);
  woke(fds);
}

// Checks whether the drive is gone: reads of its registers are all ones then, or fail.
void VfioController::check_health() {
  if (is_parked_) return;  // it is being reset
  u32 csts = 0;
  const auto n = pread(config_.device_fd, &csts, sizeof csts, static_cast<off_t>(config_.csts));
  if (n != static_cast<ssize_t>(sizeof csts) || csts == kAllOnes) {
    lose();
  } else if ((csts & kCstsFatal) != 0) {
    reset(kFatalNs);
  }
}

int VfioController::lose() {
  if (is_gone_) return 0;
  vfio_iommu_type1_dma_unmap unmap = {};
  unmap.argsz = sizeof unmap;
  unmap.flags = VFIO_DMA_UNMAP_FLAG_ALL;
  if (ioctl(config_.container_fd, VFIO_IOMMU_UNMAP_DMA, &unmap) < 0) return -errno;
  // Later doorbells go to ordinary memory, where refuse() reads them.
  const int result = replace_by_plain(doorbells_, config_.doorbells_nbytes);
  if (result != 0) return result;
  // The kernel waits for the close of the device's last descriptor.  /dev/null keeps the
  // descriptor's number in use until Python closes it.
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nothing >= 0) {
    dup3(nothing, config_.device_fd, O_CLOEXEC);
    close(nothing);
  }
  end_all(kDeviceGone);
  is_parked_ = false;
  is_gone_ = true;
  return 0;
}

void VfioController::end_all(u32 status) {
  for (size_t i = 0; i < pairs_.size(); ++i) {
    end_commands(pairs_[i], status);
    ControllerQueue& queue = queues_[i];
    queue.sq_head = queue.sq_tail = queue.cq_tail = queue.cq_head = 0;
    rung_[2 * i] = rung_[2 * i + 1] = 0;
    for (u32 k = 0; k < 2 && is_parked_; ++k) *at<u32>(doorbells_ + doorbell_offset(i, k)) = 0;
  }
  {
    std::lock_guard<std::mutex> lock(late_mutex_);
    late_.clear();
  }
  for (const u64 words : {config_.shadow, config_.event_index}) {
    if (words != 0) std::memset(at<void>(words), 0, kPageNbytes);
  }
}

// Both rings restart at their first entry, as the drive's new queues do.  If there were commands,
// one completion is left in the last slot: its submitter reaps it, which moves on to slot 0, and
// then checks all of its commands, as after every reap.
void VfioController::end_commands(QueuePair* qp, u32 status) {
  const u32 depth = qp->depth;
  u32* const completions = at<u32>(qp->completions);
  u32 carrier = depth;
  u32 reaped = depth;
  while (reaped != 0) reaped = cq_reap<NoDoorbell>(qp, 32);  // bounded by the ring
  const bool is_waited_for = load_relaxed(&qp->ticket) != load_relaxed(&qp->cq_head);
  for (u32 cid = 0; cid + 1 < depth; ++cid) {
    if (is_free(*qp, cid)) continue;
    if (is_waited_for && completion(qp, cid) == 0) {
      // Pairs with load_acquire in completion.
      store_release(&completions[cid], kCompleted | status);
    }
    if (completion(qp, cid) != 0) carrier = cid;
  }
  std::memset(at<void>(qp->sq), 0, depth * sizeof(Sqe));
  std::memset(at<void>(qp->cq), 0, depth * sizeof(Cqe));
  std::memset(at<void>(qp->marks), 0, depth * sizeof(u32));
  qp->ticket = qp->tail = qp->cq_head = 0;
  if (carrier == depth) return;
  qp->cq_head = 2 * depth - 1;  // the last slot of a lap whose completions have P = 0
  // Pairs with load_acquire in cq_reap.
  store_release(&at<Cqe>(qp->cq)[depth - 1].status,
                make_cqe_status(carrier, 0, completions[carrier] & ~kCompleted));
}

// Completes commands of a drive that is gone, in software.
u32 VfioController::refuse(u64 timeout_ns) {
  u32 posted = 0;
  for (ControllerQueue& queue : queues_) {
    Sqe sqe;
    for (u32 i = 0; i < queue.depth && sq_fetch(&queue, &sqe); ++i) {
      posted += cq_post(&queue, sqe_cid(sqe), kDeviceGone) ? 1 : 0;
    }
  }
  const u32 n = posted + pending();
  if (n != 0 || timeout_ns == 0) return n;
  pollfd fd = {config_.wake_fd, POLLIN, 0};
  const timespec limit = {0, static_cast<long>(std::min<u64>(timeout_ns, 10 * kNapNs))};
  if (ppoll(&fd, 1, &limit, nullptr) > 0) drain(config_.wake_fd);
  return 0;
}

}  // namespace gio

namespace {

gio::VfioController* as_vfio(gio::Controller* controller) {
  return static_cast<gio::VfioController*>(controller);
}

}  // namespace

int gio_vfio_controller_create(const gio::VfioConfig* config, gio::Controller** out) {
  const bool has_shadow = config->shadow != 0 && config->event_index != 0;
  if (config->namespaces == 0 || config->restart == 0) return -EINVAL;
  if (config->doorbell_nbytes < 4 || has_shadow != (config->shadow != 0)) return -EINVAL;
  if (config->lba_shift < 9 || config->lba_shift > 16) return -EINVAL;
  return gio::without_exceptions([=] {
    auto controller = std::make_unique<gio::VfioController>(*config);
    const int result = controller->map_doorbells();
    if (result == 0) *out = controller.release();  // pairs with gio_controller_destroy
    return result;
  });
}

uint64_t gio_vfio_controller_doorbells(gio::Controller* controller) {
  return as_vfio(controller)->doorbells();
}

int gio_vfio_controller_attach(gio::Controller* controller, gio::QueuePair* qp) {
  return gio::without_exceptions([=] { return as_vfio(controller)->attach_pair(qp); });
}

void gio_vfio_controller_end_all(gio::Controller* controller, uint32_t status) {
  as_vfio(controller)->end_all(status);
}

int gio_vfio_controller_lose(gio::Controller* controller) { return as_vfio(controller)->lose(); }

int gio_vfio_controller_is_gone(gio::Controller* controller) {
  return as_vfio(controller)->is_gone() ? 1 : 0;
}

int gio_vfio_controller_park(gio::Controller* controller) { return as_vfio(controller)->park(); }

void gio_vfio_controller_ask(gio::Controller* controller, uint32_t what) {
  as_vfio(controller)->ask(what);
}

uint32_t gio_vfio_controller_asked(gio::Controller* controller) {
  return as_vfio(controller)->asked();
}

uint32_t gio_vfio_controller_late(gio::Controller* controller, gio::LateCommand* out,
                                  uint32_t max) {
  return as_vfio(controller)->late_commands(out, max);
}

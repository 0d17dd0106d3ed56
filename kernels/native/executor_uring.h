// The common part of executors with a ring of io_uring: submission, sleep and wake-up.  Derived
// classes fill the entries.
#pragma once

#include <linux/futex.h>
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <ctime>
#include <vector>

#include "executor.h"
#include "uring.h"

namespace gio {

class UringLoop : public Executor {
 public:
  ~UringLoop() override {
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }

  // flags: IORING_SETUP_* in addition to those of every ring.  0 or negative errno.
  int open(const ExecutorConfig& config, u32 flags) {
    const int status = open_ring(&ring_, config.entries + kSpareEntries, flags);
    if (status != 0) return status;
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return -errno;
    fds_ = config.fds;
    first_buffered_ = static_cast<u32>(fds_.size());
    fds_.insert(fds_.end(), config.buffered_fds.begin(), config.buffered_fds.end());
    failed_.reserve(config.entries + kSpareEntries);
    return ring_.enroll(IORING_REGISTER_FILES, fds_.data(), static_cast<u32>(fds_.size()));
  }

  static int open_ring(Uring* ring, u32 entries, u32 flags) {
    // Completions are processed when this side enters the kernel anyway, instead of interrupting
    // it (Linux 5.19).  SINGLE_ISSUER and DEFER_TASKRUN would restrict the ring to one thread, but
    // the controller's owner may also serve or reset it; they saved nothing measurable.
    const u32 usual = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    const int status = ring->open(entries, flags | usual);
    return status == -EINVAL ? ring->open(entries, flags) : status;
  }

  void submit(Op* op) override {
    io_uring_sqe* sqe = ring_.next_sqe();
    if (sqe == nullptr) {  // more than `entries` under way
      failed_.push_back({op, -EBUSY});
      return;
    }
    sqe->fd = static_cast<int>(op->file + (op->is_buffered ? first_buffered_ : 0));
    sqe->flags = IOSQE_FIXED_FILE;
    sqe->user_data = reinterpret_cast<u64>(op);
    ++under_way_;
    fill(sqe, *op);
    if (op->nbytes >= kLargeNbytes && ring_.unsubmitted() >= kLargeAtOnce) enter(0);
  }

  void reap(std::vector<Done>* done, u64 timeout_ns) override {
    const size_t before = done->size();
    collect(done);
    if (done->size() != before) timeout_ns = 0;
    const bool will_doze = dozes(timeout_ns);
    if (timeout_ns != 0) timeout_ns = prepare_sleep(timeout_ns, will_doze);
    if (timeout_ns != 0 && will_doze) {
      doze(timeout_ns);
    } else if (timeout_ns != 0 || ring_.unsubmitted() != 0 || ring_.wants_enter()) {
      enter(timeout_ns);
    }
    // Pairs with wake(): the caller looks at what it signalled before, prepare_sleep() after this.
    sleep_.store(kAwake, std::memory_order_seq_cst);
    signalled_.exchange(0, std::memory_order_seq_cst);
    collect(done);
  }

  void cancel() override {
    io_uring_sqe* sqe = ring_.next_sqe();
    if (sqe == nullptr) return;  // asked for already; everything still comes back
    sqe->opcode = IORING_OP_ASYNC_CANCEL;
    sqe->fd = -1;
    sqe->cancel_flags = IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL;
    sqe->user_data = kCancelTag;
  }

  void wake() override {
    // Pairs with prepare_sleep(): either it sees the signal, or this side sees it sleeping.  Who
    // signals before it has looked wakes it for others too.
    if (signalled_.exchange(1, std::memory_order_seq_cst) != 0) return;
    const Sleep sleep = sleep_.load(std::memory_order_seq_cst);  // pairs with prepare_sleep()
    if (sleep == kDozing) syscall(SYS_futex, &signalled_, FUTEX_WAKE_PRIVATE, 1, nullptr);
    if (sleep != kInRing) return;
    const u64 one = 1;
    // Fails only if the counter would overflow: then the sleeper was woken long ago.
    if (write(wake_fd_, &one, sizeof(one)) < 0) return;
  }

  static constexpr u32 kSpareEntries = 2;  // for the wake-up and the cancellation

 protected:
  // Fills the remaining fields of a zeroed entry.
  virtual void fill(io_uring_sqe* sqe, const Op& op) = 0;

  // Converts a completion's result for Done.
  virtual long long outcome(const Op&, int result) const { return result; }

  Uring ring_;

 private:
  static constexpr u64 kWakeTag = 1;  // user_data of what is not an Op; Ops are aligned
  static constexpr u64 kCancelTag = 2;
  // If one system call submits more than two requests, the kernel merges them, up to several MiB;
  // virtual disks serve these more slowly (3.0 against 4.0 GB/s).  Small requests gain by merging.
  static constexpr u32 kLargeAtOnce = 2;
  static constexpr u64 kLargeNbytes = 128 << 10;

  // How the thread sleeps: without requests until signalled_ is set, which takes others less time.
  enum Sleep : u32 { kAwake, kInRing, kDozing };
  // Not for short sleeps: the kernel may end a futex's wait later, by the timer slack (50 us).
  static constexpr u64 kDozeNs = 1'000'000;
  bool dozes(u64 timeout_ns) const {
    return timeout_ns >= kDozeNs && under_way_ == 0 && ring_.unsubmitted() == 0;
  }
  void doze(u64 timeout_ns) {
    const timespec limit = {static_cast<time_t>(timeout_ns / 1'000'000'000),
                            static_cast<long>(timeout_ns % 1'000'000'000)};
    syscall(SYS_futex, &signalled_, FUTEX_WAIT_PRIVATE, 0, &limit);
  }

  // The time to sleep: 0 if wake() was called since the last sleep.
  u64 prepare_sleep(u64 timeout_ns, bool will_doze) {
    if (!wake_armed_ && !will_doze) {
      io_uring_sqe* sqe = ring_.next_sqe();
      if (sqe != nullptr) {
        sqe->opcode = IORING_OP_READ;
        sqe->fd = wake_fd_;
        sqe->addr = reinterpret_cast<u64>(&wake_value_);
        sqe->len = sizeof(wake_value_);
        sqe->user_data = kWakeTag;
        wake_armed_ = true;
      }
    }
    sleep_.store(will_doze ? kDozing : kInRing, std::memory_order_seq_cst);  // pairs with wake()
    return signalled_.exchange(0, std::memory_order_seq_cst) != 0 ? 0 : timeout_ns;
  }

  void enter(u64 timeout_ns) {
    const int status = ring_.enter(timeout_ns);
    if (status == 0 || status == -ETIME || status == -EINTR || status == -EAGAIN ||
        status == -EBUSY) {
      return;  // what was not submitted is tried again by the next turn
    }
    ring_.take_back([&](const io_uring_sqe& sqe) { finish(sqe.user_data, status, &failed_); });
  }

  void collect(std::vector<Done>* done) {
    ring_.drain([&](const io_uring_cqe& cqe) { finish(cqe.user_data, cqe.res, done); });
    done->insert(done->end(), failed_.begin(), failed_.end());
    failed_.clear();
  }

  void finish(u64 user_data, int result, std::vector<Done>* done) {
    if (user_data == kWakeTag) {
      wake_armed_ = false;
    } else if (user_data != kCancelTag) {
      --under_way_;
      Op* op = reinterpret_cast<Op*>(user_data);
      done->push_back({op, result_of(fds_[op->file], *op, outcome(*op, result))});
    }
  }

  std::vector<int> fds_;    // the ring's files
  u32 first_buffered_ = 0;  // of them: from here on the buffered ones
  int wake_fd_ = -1;
  u64 wake_value_ = 0;
  bool wake_armed_ = false;
  std::vector<Done> failed_;
  u32 under_way_ = 0;  // requests that the ring has
  std::atomic<u32> signalled_{0};
  std::atomic<Sleep> sleep_{kAwake};
};

}  // namespace gio

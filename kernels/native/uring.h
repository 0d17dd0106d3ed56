// io_uring by raw system calls: one ring, its mapping, its two queues.
// Sources: io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
#pragma once

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "descriptors.h"
#include "gio_uring/atomics.h"

namespace gio {

class Uring {
 public:
  Uring() = default;
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;
  ~Uring() { close(); }

  // Creates a ring of at least `entries` with IORING_SETUP_* `flags`.  0 or negative errno.
  int open(u32 entries, u32 flags) {
    io_uring_params params = {};
    params.flags = flags;
    const long fd = syscall(__NR_io_uring_setup, entries, &params);
    if (fd < 0) return -errno;
    fd_ = static_cast<int>(fd);
    Descriptors::instance().add(fd_);
    const int status = map(params);
    if (status != 0) close();
    return status;
  }

  void close() {
    if (rings_ != nullptr) munmap(rings_, rings_nbytes_);
    if (sqes_ != nullptr) munmap(sqes_, sqes_nbytes_);
    if (fd_ >= 0) Descriptors::instance().close(fd_);
    rings_ = nullptr;
    sqes_ = nullptr;
    fd_ = -1;
  }

  // A zeroed entry, submitted by the next enter(); null if the queue is full.
  io_uring_sqe* next_sqe() {
    if (unsubmitted() == sq_entries_) return nullptr;
    io_uring_sqe* sqe = sqe_at(sq_tail_);
    std::memset(sqe, 0, sizeof(*sqe) << sqe_shift_);
    ++sq_tail_;
    return sqe;
  }

  u32 unsubmitted() const {
    // Pairs with the kernel's release of the head: the entries before it were taken.
    return sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
  }

  // Submits; with a timeout, sleeps until a completion is available.  0 or negative errno.
  int enter(u64 timeout_ns) {
    // Pairs with the kernel's acquire of the tail: it sees the entries before it.
    __atomic_store_n(sq_tail_shared_, sq_tail_, __ATOMIC_RELEASE);
    __kernel_timespec deadline = {static_cast<long long>(timeout_ns / 1'000'000'000),
                                  static_cast<long long>(timeout_ns % 1'000'000'000)};
    io_uring_getevents_arg arg = {};
    arg.sigmask_sz = _NSIG / 8;
    arg.ts = reinterpret_cast<u64>(&deadline);
    const u32 flags =
        timeout_ns == 0 ? IORING_ENTER_GETEVENTS : IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    const long status = syscall(__NR_io_uring_enter, fd_, unsubmitted(), timeout_ns != 0 ? 1 : 0,
                                flags, timeout_ns != 0 ? static_cast<void*>(&arg) : nullptr,
                                timeout_ns != 0 ? sizeof(arg) : 0);
    return status < 0 ? -errno : 0;
  }

  // Takes back entries that enter() could not submit; call it after a permanent failure.
  template <typename Take>
  void take_back(Take take) {
    // Pairs with the kernel's release of the head, as in unsubmitted().
    const u32 head = __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    for (u32 i = head; i != sq_tail_; ++i) take(*sqe_at(i));
    sq_tail_ = head;
    __atomic_store_n(sq_tail_shared_, sq_tail_,
                     __ATOMIC_RELEASE);  // pairs with enter's kernel side
  }

  // Whether completions are waiting for enter() to move them into the queue.
  bool wants_enter() const {
    // Pairs with nothing: a hint, the queue itself is read with acquire.
    return (__atomic_load_n(sq_flags_, __ATOMIC_RELAXED) &
            (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)) != 0;
  }

  template <typename Take>
  void drain(Take take) {
    // Pairs with the kernel's release of the completion queue's tail.
    const u32 tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    u32 head = *cq_head_;
    for (; head != tail; ++head) take(cqes_[(head & cq_mask_) << cqe_shift_]);
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);  // pairs with the kernel's acquire
  }

  // io_uring_register(2).  0 or negative errno.
  int enroll(u32 opcode, const void* arg, u32 n) {
    const long status = syscall(__NR_io_uring_register, fd_, opcode, arg, n);
    return status < 0 ? -errno : 0;
  }

 private:
  int map(const io_uring_params& params) {
    constexpr u32 kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG |
                            IORING_FEAT_SUBMIT_STABLE;  // Linux 5.11
    if ((params.features & kNeeded) != kNeeded) return -ENOSYS;
    const u64 sq_nbytes = params.sq_off.array + params.sq_entries * sizeof(u32);
    sqe_shift_ = (params.flags & IORING_SETUP_SQE128) != 0 ? 1 : 0;
    cqe_shift_ = (params.flags & IORING_SETUP_CQE32) != 0 ? 1 : 0;
    const u64 cq_nbytes =
        params.cq_off.cqes + (params.cq_entries * sizeof(io_uring_cqe) << cqe_shift_);
    rings_nbytes_ = sq_nbytes > cq_nbytes ? sq_nbytes : cq_nbytes;
    sqes_nbytes_ = params.sq_entries * sizeof(io_uring_sqe) << sqe_shift_;
    void* rings = map_part(rings_nbytes_, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return -errno;
    rings_ = static_cast<char*>(rings);
    madvise(rings, rings_nbytes_, MADV_DONTFORK);  // or a child keeps the ring
    void* sqes = map_part(sqes_nbytes_, IORING_OFF_SQES);
    if (sqes == MAP_FAILED) return -errno;
    sqes_ = static_cast<io_uring_sqe*>(sqes);
    madvise(sqes, sqes_nbytes_, MADV_DONTFORK);

    sq_head_ = word(params.sq_off.head);
    sq_tail_shared_ = word(params.sq_off.tail);
    sq_flags_ = word(params.sq_off.flags);
    sq_mask_ = *word(params.sq_off.ring_mask);
    sq_entries_ = params.sq_entries;
    sq_tail_ = *sq_tail_shared_;
    cq_head_ = word(params.cq_off.head);
    cq_tail_ = word(params.cq_off.tail);
    cq_mask_ = *word(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    u32* array = word(params.sq_off.array);
    for (u32 i = 0; i < params.sq_entries; ++i) array[i] = i;
    return 0;
  }

  void* map_part(u64 nbytes, u64 part) {
    return mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                static_cast<off_t>(part));
  }
  io_uring_sqe* sqe_at(u32 index) const { return &sqes_[(index & sq_mask_) << sqe_shift_]; }
  u32* word(u32 offset) const { return reinterpret_cast<u32*>(rings_ + offset); }

  int fd_ = -1;
  char* rings_ = nullptr;
  u64 rings_nbytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  u64 sqes_nbytes_ = 0;
  u32 sqe_shift_ = 0;  // entries of twice the size: SQE128, CQE32
  u32 cqe_shift_ = 0;
  u32* sq_head_ = nullptr;
  u32* sq_tail_shared_ = nullptr;
  u32* sq_flags_ = nullptr;
  u32 sq_mask_ = 0;
  u32 sq_entries_ = 0;
  u32 sq_tail_ = 0;
  u32* cq_head_ = nullptr;
  u32* cq_tail_ = nullptr;
  u32 cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace gio

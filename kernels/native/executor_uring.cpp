// Requests through io_uring.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "executor.h"
#include "uring.h"

namespace gio {

namespace {

constexpr u64 kWakeTag = 1;  // user_data of what is not an Op; Ops are aligned
constexpr u64 kCancelTag = 2;
constexpr u32 kSpareEntries = 2;  // for those two
// The kernel holds more than two requests of one system call back to join them again, to several
// MiB, which virtual disks serve more slowly (3.0 against 4.0 GB/s).  Small ones gain by it.
constexpr u32 kLargeAtOnce = 2;
constexpr u64 kLargeNbytes = 128 << 10;
constexpr u32 kBuffersMax = 64;
constexpr u64 kBufferNbytesMax = 1ULL << 30;  // the kernel's limit of one registered buffer

int open_ring(Uring* ring, u32 entries) {
  // Completions are brought in when this side enters the kernel anyway, instead of by an
  // interrupt (5.19).  SINGLE_ISSUER and DEFER_TASKRUN would tie the ring to one thread, while
  // whoever holds the controller may service or reset it; they saved nothing measurable.
  const int status = ring->open(entries, IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG);
  return status == -EINVAL ? ring->open(entries, 0) : status;
}

class UringExecutor final : public Executor {
 public:
  ~UringExecutor() override {
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }

  int open(const ExecutorConfig& config) {
    const int status = open_ring(&ring_, config.entries + kSpareEntries);
    if (status != 0) return status;
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return -errno;
    std::vector<int> fds = config.fds;
    first_buffered_ = static_cast<u32>(fds.size());
    fds.insert(fds.end(), config.buffered_fds.begin(), config.buffered_fds.end());
    return ring_.enroll(IORING_REGISTER_FILES, fds.data(), static_cast<u32>(fds.size()));
  }

  void submit(Op* op) override {
    io_uring_sqe* sqe = ring_.next_sqe();
    if (sqe == nullptr) {  // more than `entries` under way
      failed_.push_back({op, -EBUSY});
      return;
    }
    sqe->fd = static_cast<int>(op->file + (op->is_buffered ? first_buffered_ : 0));
    sqe->flags = IOSQE_FIXED_FILE;
    sqe->off = op->offset;
    sqe->user_data = reinterpret_cast<u64>(op);
    switch (op->kind) {
      case OpKind::kRead:
        fill_transfer(sqe, *op, IORING_OP_READ);
        break;
      case OpKind::kWrite:
        fill_transfer(sqe, *op, IORING_OP_WRITE);
        sqe->rw_flags = op->fua ? RWF_DSYNC : 0;
        break;
      case OpKind::kFlush:
        sqe->opcode = IORING_OP_FSYNC;
        sqe->off = 0;
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
        break;
      case OpKind::kDeallocate:
        sqe->opcode = IORING_OP_FALLOCATE;
        sqe->addr = op->nbytes;  // fallocate's length
        sqe->len = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        break;
    }
    if (op->nbytes >= kLargeNbytes && ring_.unsubmitted() >= kLargeAtOnce) enter(0);
  }

  void reap(std::vector<Done>* done, u64 timeout_ns) override {
    const size_t before = done->size();
    collect(done);
    if (done->size() != before) timeout_ns = 0;
    if (timeout_ns != 0) timeout_ns = prepare_sleep(timeout_ns);
    if (timeout_ns != 0 || ring_.unsubmitted() != 0 || ring_.wants_enter()) enter(timeout_ns);
    // Pairs with wake(): what it signals from here on is seen before the next sleep.
    sleeping_.store(false, std::memory_order_seq_cst);
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
    // Pairs with prepare_sleep(): either it sees the signal, or this side sees it sleeping.
    signalled_.store(true, std::memory_order_seq_cst);
    if (!sleeping_.load(std::memory_order_seq_cst)) return;  // pairs with prepare_sleep()
    const u64 one = 1;
    // Only fails when the counter is about to overflow: then the sleeper was woken long ago.
    if (write(wake_fd_, &one, sizeof(one)) < 0) return;
  }

  ExecutorKind kind() const override { return kExecutorUring; }

  int add_buffer(u64 address, u64 nbytes) override;
  int remove_buffer(u64 address) override;

 private:
  struct Buffer {
    u64 address;
    u64 nbytes;
    u64 region;  // the address that add_buffer was called with; 0 = free
  };

  // The time to sleep: nothing when a wake() came in since the last sleep.
  u64 prepare_sleep(u64 timeout_ns) {
    if (!wake_armed_) {
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
    sleeping_.store(true, std::memory_order_seq_cst);  // pairs with wake()
    return signalled_.exchange(false, std::memory_order_seq_cst) ? 0 : timeout_ns;
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
      done->push_back({reinterpret_cast<Op*>(user_data), result});
    }
  }

  void fill_transfer(io_uring_sqe* sqe, const Op& op, u8 opcode);
  int find_buffer(const Op& op);
  int update_buffer(u32 index, u64 address, u64 nbytes);

  Uring ring_;
  u32 first_buffered_ = 0;  // of the ring's files: from here on the buffered ones
  int wake_fd_ = -1;
  u64 wake_value_ = 0;
  bool wake_armed_ = false;
  std::vector<Done> failed_;
  std::atomic<bool> signalled_{false};
  std::atomic<bool> sleeping_{false};

  std::mutex buffers_mutex_;
  std::vector<Buffer> buffers_;  // by the ring's index; empty until the first add_buffer
};

void UringExecutor::fill_transfer(io_uring_sqe* sqe, const Op& op, u8 opcode) {
  const int buffer = find_buffer(op);
  if (buffer >= 0) {
    sqe->opcode = opcode == IORING_OP_READ ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
    sqe->buf_index = static_cast<u16>(buffer);
  } else {
    sqe->opcode = opcode;
  }
  if (buffer >= 0 || op.n_iov == 1) {
    sqe->addr = reinterpret_cast<u64>(op.iov[0].iov_base);
    sqe->len = static_cast<u32>(op.nbytes);
  } else {
    sqe->opcode = opcode == IORING_OP_READ ? IORING_OP_READV : IORING_OP_WRITEV;
    sqe->addr = reinterpret_cast<u64>(op.iov);
    sqe->len = op.n_iov;
  }
}

// The registered buffer that holds the whole transfer in one piece, or -1.
int UringExecutor::find_buffer(const Op& op) {
  std::lock_guard<std::mutex> lock(buffers_mutex_);
  if (buffers_.empty()) return -1;
  const u64 address = reinterpret_cast<u64>(op.iov[0].iov_base);
  u64 end = address;
  for (u32 i = 0; i < op.n_iov; ++i) {
    if (reinterpret_cast<u64>(op.iov[i].iov_base) != end) return -1;
    end += op.iov[i].iov_len;
  }
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    if (buffer.region != 0 && address >= buffer.address && end <= buffer.address + buffer.nbytes) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int UringExecutor::update_buffer(u32 index, u64 address, u64 nbytes) {
  iovec buffer = {reinterpret_cast<void*>(address), nbytes};
  u64 tag = 0;
  io_uring_rsrc_update2 update = {};
  update.offset = index;
  update.data = reinterpret_cast<u64>(&buffer);
  update.tags = reinterpret_cast<u64>(&tag);
  update.nr = 1;
  const long status = ring_.enroll(IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof(update));
  return static_cast<int>(status);
}

int UringExecutor::add_buffer(u64 address, u64 nbytes) {
  std::lock_guard<std::mutex> lock(buffers_mutex_);
  if (buffers_.empty()) {
    io_uring_rsrc_register table = {};
    table.nr = kBuffersMax;
    table.flags = IORING_RSRC_REGISTER_SPARSE;  // 5.19
    const int status = ring_.enroll(IORING_REGISTER_BUFFERS2, &table, sizeof(table));
    if (status != 0) return status;
    buffers_.assign(kBuffersMax, Buffer{});
  }
  int status = 0;
  u32 index = 0;
  for (u64 done = 0; done < nbytes && status == 0; done += kBufferNbytesMax) {
    while (index < kBuffersMax && buffers_[index].region != 0) ++index;
    if (index == kBuffersMax) return -ENOSPC;  // the rest is transferred unregistered
    const u64 part = std::min(kBufferNbytesMax, nbytes - done);
    status = update_buffer(index, address + done, part);
    if (status == 0) buffers_[index] = {address + done, part, address};
  }
  return status;
}

int UringExecutor::remove_buffer(u64 address) {
  std::lock_guard<std::mutex> lock(buffers_mutex_);
  int status = -ENOENT;
  for (u32 i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].region != address) continue;
    status = update_buffer(i, 0, 0);
    buffers_[i] = {};
  }
  return status;
}

}  // namespace

int uring_refusal() {
  Uring ring;
  return open_ring(&ring, kSpareEntries);
}

std::unique_ptr<Executor> make_uring_executor(const ExecutorConfig& config, int* error) {
  auto executor = std::make_unique<UringExecutor>();
  *error = executor->open(config);
  if (*error != 0) return nullptr;
  return executor;
}

}  // namespace gio

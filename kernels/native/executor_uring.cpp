// Requests through io_uring.
#include "executor_uring.h"

#include <fcntl.h>
#include <linux/falloc.h>

#include <algorithm>
#include <mutex>

namespace gio {

namespace {

constexpr u32 kBuffersMax = 64;
constexpr u64 kBufferNbytesMax = 1ULL << 30;  // the kernel's limit of one registered buffer

class UringExecutor final : public UringLoop {
 public:
  ExecutorKind kind() const override { return kExecutorUring; }

  int add_buffer(u64 address, u64 nbytes) override;
  int remove_buffer(u64 address) override;

 protected:
  void fill(io_uring_sqe* sqe, const Op& op) override {
    sqe->off = op.offset;
    switch (op.kind) {
      case OpKind::kRead:
        fill_transfer(sqe, op, IORING_OP_READ);
        break;
      case OpKind::kWrite:
        fill_transfer(sqe, op, IORING_OP_WRITE);
        sqe->rw_flags = op.fua ? RWF_DSYNC : 0;
        break;
      case OpKind::kFlush:
        sqe->opcode = IORING_OP_FSYNC;
        sqe->off = 0;
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
        break;
      case OpKind::kDeallocate:
        sqe->opcode = IORING_OP_FALLOCATE;
        sqe->addr = op.nbytes;  // fallocate's length
        sqe->len = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        break;
    }
  }

 private:
  struct Buffer {
    u64 address;
    u64 nbytes;
    u64 region;  // the address that add_buffer was called with; 0 = free
  };

  void fill_transfer(io_uring_sqe* sqe, const Op& op, u8 opcode);
  int find_buffer(const Op& op);
  int update_buffer(u32 index, u64 address, u64 nbytes);

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
  return UringLoop::open_ring(&ring, UringLoop::kSpareEntries, 0);
}

std::unique_ptr<Executor> make_uring_executor(const ExecutorConfig& config, int* error) {
  auto executor = std::make_unique<UringExecutor>();
  *error = executor->open(config, 0);
  if (*error != 0) return nullptr;
  return executor;
}

}  // namespace gio

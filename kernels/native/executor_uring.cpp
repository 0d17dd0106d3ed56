// Requests through io_uring.
#include "executor_uring.h"

#include <fcntl.h>
#include <linux/falloc.h>

namespace gio {

namespace {

class UringExecutor final : public UringLoop {
 public:
  ExecutorKind kind() const override { return kExecutorUring; }

 protected:
  void fill(io_uring_sqe* sqe, const Op& op) override {
    sqe->off = op.offset;
    switch (op.kind) {
      case OpKind::kRead:
        fill_transfer(sqe, op, true);
        break;
      case OpKind::kWrite:
        fill_transfer(sqe, op, false);
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
  static void fill_transfer(io_uring_sqe* sqe, const Op& op, bool reads) {
    if (op.n_iov == 1) {
      sqe->opcode = reads ? IORING_OP_READ : IORING_OP_WRITE;
      sqe->addr = reinterpret_cast<u64>(op.iov[0].iov_base);
      sqe->len = static_cast<u32>(op.nbytes);
    } else {
      sqe->opcode = reads ? IORING_OP_READV : IORING_OP_WRITEV;
      sqe->addr = reinterpret_cast<u64>(op.iov);
      sqe->len = op.n_iov;
    }
  }
};

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

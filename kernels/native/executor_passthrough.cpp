// Sends NVMe commands through io_uring to a generic character device, /dev/ngXnY: they bypass the
// block layer and use the kernel driver's queues.
// Sources: linux/nvme_ioctl.h; NVM Express NVM Command Set Specification for the commands.
#include <linux/nvme_ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "executor_uring.h"
#include "gio_uring/nvme_spec.h"

namespace gio {

namespace {

static_assert(sizeof(nvme_uring_cmd) <= 80, "a long entry has room for 80 bytes of command");

// Converts a command's status to a result; to an errno if it is handled as for a file.
long long result_of_status(u32 status) {
  switch (status & kTypeAndCode) {
    case kInvalidField:
      return -EINVAL;
    case kInvalidNamespace:
      return -ENODEV;
    case kAbortRequested:
    case kAbortedSqDeletion:
      return -ECANCELED;
    default:
      return result_of_nvme(status);
  }
}

class PassthroughExecutor final : public UringLoop {
 public:
  explicit PassthroughExecutor(const ExecutorConfig& config)
      : generic_(config.generic), ranges_(config.entries) {}

  ExecutorKind kind() const override { return kExecutorPassthrough; }

 protected:
  void fill(io_uring_sqe* sqe, const Op& op) override {
    const GenericNamespace& at = generic_[op.file];
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->cmd_op = NVME_URING_CMD_IO;
    nvme_uring_cmd command = {};
    command.nsid = at.nsid;
    switch (op.kind) {
      case OpKind::kRead:
      case OpKind::kWrite:
        fill_transfer(&command, op, at.lba_nbytes);
        if (op.n_iov != 1) sqe->cmd_op = NVME_URING_CMD_IO_VEC;
        break;
      case OpKind::kFlush:
        command.opcode = kFlush;
        break;
      case OpKind::kDeallocate:
        fill_deallocate(&command, op, at.lba_nbytes);
        break;
    }
    std::memcpy(sqe->cmd, &command, sizeof(command));
  }

  long long outcome(const Op& op, int result) const override {
    if (result > 0) return result_of_status(static_cast<u32>(result));
    if (result < 0) return result;
    const bool moves = op.kind == OpKind::kRead || op.kind == OpKind::kWrite;
    return moves ? static_cast<long long>(op.nbytes) : 0;
  }

 private:
  static void fill_transfer(nvme_uring_cmd* command, const Op& op, u32 lba_nbytes) {
    const u64 slba = op.offset / lba_nbytes;
    command->opcode = op.kind == OpKind::kRead ? kRead : kWrite;
    command->cdw10 = static_cast<u32>(slba);
    command->cdw11 = static_cast<u32>(slba >> 32);
    command->cdw12 = static_cast<u32>(op.nbytes / lba_nbytes - 1) | (op.fua ? kFua : 0);
    if (op.n_iov == 1) {
      command->addr = reinterpret_cast<u64>(op.iov[0].iov_base);
      command->data_len = static_cast<u32>(op.nbytes);
    } else {
      command->addr = reinterpret_cast<u64>(op.iov);
      command->data_len = op.n_iov;
    }
  }

  void fill_deallocate(nvme_uring_cmd* command, const Op& op, u32 lba_nbytes) {
    constexpr u64 kRangeNlbMax = ~0u;
    DsmRange& range = ranges_[op.slot];
    // Blocks beyond one range stay allocated: deallocation is only advice to the drive.
    const u64 nlb = std::min(op.nbytes / lba_nbytes, kRangeNlbMax);
    range = {0, static_cast<u32>(nlb), op.offset / lba_nbytes};
    command->opcode = kDatasetManagement;
    command->cdw10 = 0;  // one range
    command->cdw11 = kDsmDeallocate;
    command->addr = reinterpret_cast<u64>(&range);
    command->data_len = sizeof(range);
  }

  const std::vector<GenericNamespace> generic_;
  std::vector<DsmRange> ranges_;  // by slot; the kernel reads them while the request is under way
};

}  // namespace

std::unique_ptr<Executor> make_passthrough_executor(const ExecutorConfig& config, int* error) {
  auto executor = std::make_unique<PassthroughExecutor>(config);
  *error = executor->open(config, IORING_SETUP_SQE128 | IORING_SETUP_CQE32);
  if (*error != 0) return nullptr;
  return executor;
}

}  // namespace gio

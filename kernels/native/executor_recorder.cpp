// Logs everything that reached the medium, in the order in which it was acknowledged.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "executor.h"
#include "gio_uring/nvme_spec.h"

namespace gio {

namespace {

constexpr int kVectorMax = 1024;  // UIO_MAXIOV

// Writes the whole vector, also after short writes.  0 or negative errno.
int write_all(int fd, iovec* iov, int n) {
  while (n > 0) {  // bounded: every turn writes at least a byte or ends
    if (iov->iov_len == 0) {
      ++iov;
      --n;
      continue;
    }
    const ssize_t written = writev(fd, iov, std::min(n, kVectorMax));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? -errno : -EIO;
    size_t left = static_cast<size_t>(written);
    for (; n > 0 && left >= iov->iov_len; ++iov, --n) left -= iov->iov_len;
    if (n > 0) {
      iov->iov_base = static_cast<char*>(iov->iov_base) + left;
      iov->iov_len -= left;
    }
  }
  return 0;
}

class RecorderExecutor final : public Executor {
 public:
  RecorderExecutor(std::unique_ptr<Executor> inner, u32 entries, int record_fd)
      : inner_(std::move(inner)), covered_(entries), record_fd_(record_fd) {}

  void submit(Op* op) override {
    covered_[op->slot] = logged_;
    inner_->submit(op);
  }

  void reap(std::vector<Done>* done, u64 timeout_ns) override {
    size_t i = done->size();
    inner_->reap(done, timeout_ns);
    for (; i < done->size(); ++i) {
      Done& ended = (*done)[i];
      if (ended.result < 0 || ended.op->kind == OpKind::kRead) continue;
      const int status = record(*ended.op, ended.result);
      if (status < 0) ended.result = status;
    }
  }

  void cancel() override { inner_->cancel(); }
  void wake() override { inner_->wake(); }
  ExecutorKind kind() const override { return inner_->kind(); }

 private:
  int record(const Op& op, long long result) {
    RecordHeader header = {};
    std::memcpy(header.magic, "GREC", 4);
    header.opcode = op.kind == OpKind::kWrite   ? kWrite
                    : op.kind == OpKind::kFlush ? kFlush
                                                : kDatasetManagement;
    header.nsid = op.file + 1;
    header.flags = op.fua ? kRecordFua : 0;
    header.offset = op.offset;
    header.nbytes = op.kind == OpKind::kWrite ? static_cast<u64>(result) : op.nbytes;
    header.covered = covered_[op.slot];
    vector_.assign(1, {&header, sizeof(header)});
    u64 left = op.kind == OpKind::kWrite ? header.nbytes : 0;
    for (u32 i = 0; i < op.n_iov && left != 0; ++i) {
      const u64 nbytes = left < op.iov[i].iov_len ? left : op.iov[i].iov_len;
      vector_.push_back({op.iov[i].iov_base, nbytes});
      left -= nbytes;
    }
    ++logged_;
    return write_all(record_fd_, vector_.data(), static_cast<int>(vector_.size()));
  }

  std::unique_ptr<Executor> inner_;
  std::vector<u64> covered_;  // by slot
  std::vector<iovec> vector_;
  u64 logged_ = 0;
  int record_fd_;
};

}  // namespace

std::unique_ptr<Executor> make_recorder(std::unique_ptr<Executor> inner, u32 entries,
                                        int record_fd) {
  return std::make_unique<RecorderExecutor>(std::move(inner), entries, record_fd);
}

}  // namespace gio

// A small pool of threads that call preadv, pwritev2, fdatasync and fallocate: for sandboxes and
// kernels that refuse io_uring.
#include <fcntl.h>
#include <linux/falloc.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "executor.h"

namespace gio {

namespace {

// Interval at which sleeping workers wake by themselves.
constexpr std::chrono::seconds kIdle(1);

long long execute(int fd, const Op& op) {
  ssize_t result = -1;
  switch (op.kind) {
    case OpKind::kRead:
      result = preadv(fd, op.iov, static_cast<int>(op.n_iov), static_cast<off_t>(op.offset));
      break;
    case OpKind::kWrite:
      result = pwritev2(fd, op.iov, static_cast<int>(op.n_iov), static_cast<off_t>(op.offset),
                        op.fua ? RWF_DSYNC : 0);
      break;
    case OpKind::kFlush:
      result = fdatasync(fd);
      break;
    case OpKind::kDeallocate:
      result = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         static_cast<off_t>(op.offset), static_cast<off_t>(op.nbytes));
      break;
  }
  return result < 0 ? -errno : result;
}

class ThreadsExecutor final : public Executor {
 public:
  explicit ThreadsExecutor(const ExecutorConfig& config)
      : fds_(config.fds), buffered_fds_(config.buffered_fds) {
    // No allocation is allowed later.
    submitted_.reserve(config.entries);
    todo_.reserve(config.entries);
    done_.reserve(config.entries);
    workers_.reserve(config.threads);
    try {
      for (u32 i = 0; i < config.threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {  // fewer threads than asked for: none of them may outlive this
      stop();
      throw;
    }
  }

  ~ThreadsExecutor() override { stop(); }

  void submit(Op* op) override { submitted_.push_back(op); }

  void reap(std::vector<Done>* done, u64 timeout_ns) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!submitted_.empty()) {
      todo_.insert(todo_.end(), submitted_.begin(), submitted_.end());
      if (submitted_.size() == 1) {
        todo_changed_.notify_one();
      } else {
        todo_changed_.notify_all();
      }
      submitted_.clear();
    }
    if (done_.empty() && !woken_ && timeout_ns != 0) {
      done_changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                             [this] { return !done_.empty() || woken_; });
    }
    woken_ = false;
    done->insert(done->end(), done_.begin(), done_.end());
    done_.clear();
  }

  void cancel() override {
    std::lock_guard<std::mutex> lock(mutex_);
    todo_.insert(todo_.end(), submitted_.begin(), submitted_.end());
    submitted_.clear();
    for (Op* op : todo_) done_.push_back({op, -ECANCELED});
    todo_.clear();
  }

  void wake() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    done_changed_.notify_one();
  }

  ExecutorKind kind() const override { return kExecutorThreads; }

 private:
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    todo_changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {  // bounded by the destructor
      if (todo_.empty()) {
        todo_changed_.wait_for(lock, kIdle, [this] { return stop_ || !todo_.empty(); });
        continue;
      }
      Op* op = todo_.front();
      todo_.erase(todo_.begin());
      lock.unlock();
      const int fd = op->is_buffered ? buffered_fds_[op->file] : fds_[op->file];
      const long long result = result_of(fd, *op, execute(fd, *op));
      lock.lock();
      done_.push_back({op, result});
      if (done_.size() == 1) done_changed_.notify_one();
    }
  }

  const std::vector<int> fds_;
  const std::vector<int> buffered_fds_;
  std::vector<Op*> submitted_;  // of the servicing thread alone
  std::mutex mutex_;
  std::condition_variable todo_changed_;
  std::condition_variable done_changed_;
  std::vector<Op*> todo_;  // the first one first
  std::vector<Done> done_;
  bool woken_ = false;
  bool stop_ = false;
  std::vector<std::thread> workers_;  // last: they use everything above
};

}  // namespace

std::unique_ptr<Executor> make_threads_executor(const ExecutorConfig& config) {
  return std::make_unique<ThreadsExecutor>(config);
}

}  // namespace gio

// Computes digests of slices: in workers, and in the service thread if it has nothing else to do,
// a layer is urgent or too many wait, so that progress never depends on a worker.
#include <sched.h>

#include <algorithm>

#include "drive_loop.h"
#include "hash.h"

namespace gio {

namespace {

constexpr u64 kOffloadNbytes = 128 << 10;  // less is hashed sooner than handed over
constexpr u64 kPieceNbytes = 256 << 10;    // of a task: threads take turns
constexpr u32 kHelpPieces = 64;            // that a service thread hashes before it goes on
constexpr u64 kMoveNs = 1'000'000;         // a thread leaves a processor at most so often

// Moves this thread away from a processor, and then restores its affinity mask.
void leave(int processor) {
  cpu_set_t all;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  cpu_set_t others = all;
  CPU_CLR(processor, &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}

}  // namespace

// Hashes the slices that are complete now, which are consecutive.
void ServiceThread::digest_command(Part* part, const Completed& completed) {
  Job* job = part->job;
  const Iocb& io = job->config.iocb;
  const Run& run = job->runs[completed.run];
  DigestTask task = {job, completed.layer, run.first, run.first + run_slices(io, run)};
  if (!job->whole_slices) {
    u32 left = run.nlb;
    u32 skip_nlb = run.skip >> io.lba_shift;
    const u32 end = task.end;
    task.end = task.first;
    for (u32 i = run.first; i < end; ++i) {
      const u32 covered = std::min(left, io.slice_nlb - skip_nlb);
      left -= covered;
      skip_nlb = 0;
      u32& slice = job->slice_left[static_cast<size_t>(completed.layer) * io.n_pages + i];
      slice -= covered;
      if (slice != 0) continue;
      if (task.end == task.first) task.first = i;
      task.end = i + 1;
    }
  }
  ++job->refs;  // dropped when the task is done
  const u64 nbytes = static_cast<u64>(task.end - task.first) * io.slice_nlb << io.lba_shift;
  const bool is_urgent = job->is_urgent(completed.layer);
  const bool is_alone = is_urgent && finished_.size() == 1 && nbytes < kAloneNbytes;
  if (nbytes < kOffloadNbytes) {
    engine_->digest(task);
  } else if (is_alone || !engine_->offer(task)) {
    hash(task);
  } else {
    shares_ = true;
    helps_ = helps_ || is_urgent;
  }
}

// Hashes what no worker has begun, if this thread has offered something urgent.  That includes what
// comes before it: layers are ready in their order.
void ServiceThread::help() {
  for (u32 n = 0; helps_ && n < kHelpPieces; ++n) {  // bounded: other threads may offer more
    if (!hash_piece()) break;
  }
  helps_ = false;
}

// Hashes a piece that no worker has begun; false if there is none.
bool ServiceThread::hash_piece() {
  std::unique_lock<std::mutex> lock(engine_->tasks_mutex_);
  if (engine_->tasks_.empty()) return false;
  const DigestTask task = engine_->take();
  lock.unlock();
  hash(task);
  return true;
}

// Hashes in a service thread, which takes long.  Another service thread that hashes on the same
// processor would wait, and the kernel may leave both there for a whole load, although another
// processor is less busy.
void ServiceThread::hash(const DigestTask& task) {
  int processor = sched_getcpu();
  if (engine_->is_hashing_on(processor) && monotonic_ns() >= next_move_ns_) {
    leave(processor);
    processor = sched_getcpu();
    next_move_ns_ = monotonic_ns() + kMoveNs;
  }
  hashes_on_ = processor;
  engine_->digest(task);
  hashes_on_ = kNowhere;
}

bool Engine::is_hashing_on(int processor) const {
  return std::any_of(threads_.begin(), threads_.end(),
                     [processor](const auto& thread) { return thread->hashes_on() == processor; });
}

// Hashes slices that have arrived or are being written; this counts as the end of a command.
void Engine::digest(const DigestTask& task) {
  Job* job = task.job;
  if (!job->done) {
    const u64 start = monotonic_ns();
    for (u32 i = task.first; i < task.end; ++i) digest_slice(job, task.layer, i);
    digest_ns_ += monotonic_ns() - start;
    layer_command_ended(job, task.layer);
  }
  drop(job);
}

void Engine::digest_slice(Job* job, u32 layer, u32 page_index) {
  const Iocb& io = job->config.iocb;
  const u64 page = at<u32>(io.pages)[page_index];
  tutti::Segment segments[kSegmentsMax];
  for (u32 k = 0; k < io.n_segments; ++k) {
    const u64 base = at<u64>(io.bases)[static_cast<size_t>(layer) * io.n_segments + k];
    segments[k] = {at<const uint8_t>(base + page * io.segment_stride[k]), io.segment_nbytes[k]};
  }
  const u64 digest = tutti::xxh3_segments(segments, io.n_segments);
  u64* expected =
      at<u64>(job->config.digests) + static_cast<size_t>(page_index) * job->n_layers + layer;
  if (job->config.digest == kDigestCompute) {
    *expected = digest;
  } else if (*expected != digest) {
    mark_pages(job, page_index, page_index + 1, kDigestMismatch);
  }
}

// Gives a task to the workers; false if so many wait already.
bool Engine::offer(const DigestTask& task) {
  if (workers_.empty()) return false;
  {
    std::lock_guard<std::mutex> lock(tasks_mutex_);
    if (tasks_.size() == tasks_.capacity()) return false;
    tasks_.push_back(task);
  }
  task_came_.notify_one();
  return true;
}

// Takes a piece of the first task.  The mutex must be held, and a task be there.
DigestTask Engine::take() {
  DigestTask& task = tasks_.front();
  DigestTask piece = task;
  const Iocb& io = task.job->config.iocb;
  const u64 slice_nbytes = static_cast<u64>(io.slice_nlb) << io.lba_shift;
  const u32 most = static_cast<u32>(std::max<u64>(kPieceNbytes / slice_nbytes, 1));
  if (task.end - task.first <= most) {
    tasks_.erase(tasks_.begin());
  } else {  // the rest counts as another command
    piece.end = task.first = task.first + most;
    ++task.job->refs;
    ++task.job->layer_left[task.layer];
  }
  return piece;
}

void Engine::work(std::atomic<u64>* cpu_ns) {
  std::unique_lock<std::mutex> lock(tasks_mutex_);
  while (!workers_end_ || !tasks_.empty()) {  // bounded by end_workers
    if (tasks_.empty()) {
      *cpu_ns = thread_cpu_ns();
      task_came_.wait(lock);
      continue;
    }
    const u32 end = tasks_.front().end;
    const DigestTask task = take();
    if (task.end == end) ++offloaded_;
    lock.unlock();
    digest(task);
    lock.lock();
  }
}

void Engine::end_workers() {
  {
    std::lock_guard<std::mutex> lock(tasks_mutex_);
    workers_end_ = true;
  }
  task_came_.notify_all();
  for (auto& worker : workers_) worker.join();
}

}  // namespace gio

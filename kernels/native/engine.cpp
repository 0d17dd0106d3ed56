// The host engine: jobs, from their submission to their release, and their waiters.
#include "engine.h"

#include <errno.h>
#include <time.h>

#include <algorithm>
#include <chrono>

#include "drive_loop.h"

namespace gio {
namespace {

constexpr u64 kResetSlackNs = 400'000'000;  // a sleeping thread wakes more often than that

// Sets a status unless it is set: the first error of a page, or of a job, is kept.
void set_once(u32* word, u32 status) {
  u32 none = 0;  // pairs with the caller's read once the job is done
  __atomic_compare_exchange_n(word, &none, status, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

}  // namespace

// A job that follows another one, allocated with it.
struct Next {
  explicit Next(const JobConfig& config) : job(config) {}

  Job job;
  std::vector<std::list<Part>> parts;
};

u64 thread_cpu_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000u + static_cast<u64>(t.tv_nsec);
}

Job::Job(const JobConfig& c)
    : config(c),
      runs(at<Run>(c.iocb.runs)),
      n_layers(c.iocb.n_layers),
      has_pages(c.iocb.opcode == kRead || c.iocb.opcode == kWrite),
      whole_slices(true),
      digests_early(c.iocb.opcode == kWrite && c.digest == kDigestCompute && c.gated == 0),
      layer_left(new std::atomic<u32>[c.iocb.n_layers]),
      submitted_ns(monotonic_ns()),
      refs(1),
      gate(c.gated == 0),
      ahead(c.ahead != 0),
      place{c.tag},
      granted(c.held != 0 ? c.held - 1 : c.iocb.n_layers) {
  const u32 ends = c.iocb.n_runs * (digests_early ? 2 : 1);
  for (u32 layer = 0; layer < n_layers; ++layer) layer_left[layer] = ends;
  if (config.digest == kDigestNone) return;
  for (u32 r = 0; r < c.iocb.n_runs && whole_slices; ++r) {
    whole_slices = runs[r].skip == 0 && runs[r].nlb % c.iocb.slice_nlb == 0;
  }
  if (!whole_slices) {
    slice_left.assign(static_cast<size_t>(n_layers) * c.iocb.n_pages, c.iocb.slice_nlb);
  }
}

Job::~Job() = default;

Engine::Engine(const EngineConfig& config)
    : n_threads_(config.n_threads),
      threads_left_(config.n_threads),
      worker_cpu_ns_(config.digest_workers) {
  const Route* routes = at<Route>(config.routes);
  routes_.assign(routes, routes + config.n_routes);
  for (u32 i = 0; i < n_threads_; ++i) {
    threads_.push_back(std::make_unique<ServiceThread>(this,
                                                       at<ServiceThreadConfig>(config.threads)[i],
                                                       config.list_nbytes, config.window_nbytes));
  }
  tasks_.reserve(kWaitingTasks * n_threads_);
  try {
    for (u32 i = 0; i < config.digest_workers; ++i) {
      workers_.emplace_back([this, i] { work(&worker_cpu_ns_[i]); });
    }
    for (auto& thread : threads_) thread->start();
  } catch (...) {
    threads_left_ = 0;
    stop_ = true;
    for (auto& thread : threads_) thread->join();
    end_workers();
    throw;
  }
}

Engine::~Engine() {
  for (auto& thread : threads_) thread->join();  // stop() came before and bounded this
}

// Splits a job's runs by service thread; a slice has one namespace, so no two threads share it.
std::vector<std::list<Part>> Engine::split(Job* job) const {
  std::vector<std::list<Part>> parts(n_threads_);
  const u32 n_runs = job->config.iocb.n_runs;
  for (u32 r = 0; r < n_runs; ++r) {
    const u32 nsid = job->runs[r].nsid;
    std::list<Part>& part = parts[nsid - 1 < routes_.size() ? routes_[nsid - 1].thread : 0];
    if (part.empty()) part.emplace_back(job);
    if (n_threads_ == 1) break;
    part.front().runs.push_back(r);
  }
  for (auto& part : parts) {
    if (part.empty()) continue;
    Part& one = part.front();
    one.n_runs = n_threads_ == 1 ? n_runs : static_cast<u32>(one.runs.size());
    one.n_commands = static_cast<u64>(one.n_runs) * job->n_layers;
    if (job->config.gated != 0) one.deferred.reserve(one.n_commands);
  }
  return parts;
}

int Engine::submit(const JobConfig& config, Job** out) {
  auto job = std::make_unique<Job>(config);
  std::vector<std::list<Part>> parts = split(job.get());
  if (config.then != 0) {
    job->next = std::make_unique<Next>(*at<JobConfig>(config.then));
    job->next->job.before = job.get();
    job->next->parts = split(&job->next->job);
  }
  const bool is_empty = config.iocb.n_runs == 0 || config.iocb.n_layers == 0;
  Job* const taken = job.get();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (exited_ || stop_) return -ESHUTDOWN;
    taken->consumer.expect(usual_pace_ns());
    *out = job.release();  // its ownership pairs with gio_job_free, which may come at once
    begin(taken, &parts);
  }
  if (is_empty) {
    std::lock_guard<std::mutex> lock(taken->mutex);
    end(taken);
    taken->layers_ready = taken->n_layers;
  }
  drop(taken);
  return 0;
}

// Gives the parts of a job to their service threads.  The mutex must be held.
void Engine::begin(Job* job, std::vector<std::list<Part>>* parts) {
  ++jobs_;
  if (job->n_layers == 0) return;
  for (u32 i = 0; i < n_threads_; ++i) {
    if ((*parts)[i].empty()) continue;
    ++job->refs;
    threads_[i]->push(&(*parts)[i]);
  }
}

template <typename Ready>
int Engine::wait(std::condition_variable* changed, u64 timeout_ns, Ready ready) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed->wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready) ? 0 : -ETIMEDOUT;
}

// The controllers' clock; 0 once they may have been destroyed.
u64 Engine::clock_ns() {
  std::lock_guard<std::mutex> lock(mutex_);
  return exited_ ? 0 : threads_[0]->clock_ns();
}

int Engine::wait_layers(Job* job, u32 layers, u64 timeout_ns) {
  if (job->ahead && job->ahead.exchange(false)) attend();
  job->consumer.asks(layers, clock_ns());
  const auto ready = [&] { return job->layers_ready >= layers || job->done; };
  const auto wait_for_layers = [&] {
    if (layers < job->waited) job->waited = layers;  // before the look: pairs with notify
    return ready();
  };
  const int result = ready() ? 0 : wait(&changed_, timeout_ns, wait_for_layers);
  if (result == 0) job->consumer.gets(layers, clock_ns());
  const u64 pace_ns = job->consumer.pace_ns();
  if (result == 0 && layers >= job->n_layers && pace_ns != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    paces_ns_[n_consumers_++ % kConsumers] = pace_ns;
  }
  return result;
}

// The slowest pace of the last consumers: a new one is not expected to be slower.  0 if unknown.
u64 Engine::usual_pace_ns() const {
  return n_consumers_ < kConsumers ? 0 : *std::max_element(paces_ns_, paces_ns_ + kConsumers);
}

int Engine::wait_released(const Job* job, u64 timeout_ns) {
  return wait(&released_came_, timeout_ns, [&] { return job->released.load(); });
}

void Engine::open_gate(Job* job) {
  job->gate = true;
  attend();
}

void Engine::grant(Job* job, u32 layers, u32 report_at) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (job->report.empty()) job->report.push_back(job->config.tag | kReport);
    job->report_at = report_at;
  }
  if (job->layers_ready >= report_at) report(job);  // pairs with layer_command_ended
  // Grants of reads may come in any order; a write stops at its next command.
  const bool stops = job->config.iocb.opcode == kWrite;
  job->granted = stops ? layers : std::max<u32>(job->granted, layers);
  attend();
}

void Engine::report(Job* job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (job->report.empty() || job->layers_ready < job->report_at) return;
    job->report_at = ~0u;
    released_.splice(released_.end(), job->report);
  }
  released_came_.notify_all();
}

void Engine::cancel(Job* job) {
  job->cancel = true;
  attend();
}

// Makes every service thread check the flags of its jobs.  Threads that have ended have no jobs,
// and their controllers may have been destroyed.
void Engine::attend() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (exited_) return;
  for (auto& thread : threads_) thread->attend();
}

u64 Engine::next_released(u64 timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  released_came_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                          [&] { return !released_.empty() || exited_; });
  if (released_.empty()) return exited_ ? ~0ull : 0;
  const u64 tag = released_.front();
  released_.pop_front();
  return tag;
}

int Engine::reset(u64 timeout_ns) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (exited_) return 0;
    for (auto& thread : threads_) thread->want_reset(timeout_ns);
  }
  const auto is_reset = [&] {
    return exited_ || std::all_of(threads_.begin(), threads_.end(),
                                  [](const auto& thread) { return thread->is_reset(); });
  };
  if (wait(&changed_, timeout_ns + kResetSlackNs, is_reset) != 0) return -ETIMEDOUT;
  int result = 0;
  for (auto& thread : threads_) {
    if (thread->reset_result() != 0) result = thread->reset_result();
  }
  return result;
}

int Engine::stop(u64 timeout_ns) {
  stop_ = true;
  attend();
  const auto is_over = [&] { return exited_; };
  if (wait(&changed_, timeout_ns, is_over) != 0 && reset(timeout_ns) != 0) return -EBUSY;
  for (auto& thread : threads_)
    thread->join();  // nothing is outstanding: they end at their next turn
  return 0;
}

// Called at a service thread's end; the last one ends the workers, once they have no tasks.
void Engine::thread_ended() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--threads_left_ != 0) return;
  }
  end_workers();
  std::lock_guard<std::mutex> lock(mutex_);
  exited_ = true;
  changed_.notify_all();
  released_came_.notify_all();
}

EngineStats Engine::stats() const {
  EngineStats stats = {};
  stats.jobs = jobs_;
  stats.digest_ns = digest_ns_;
  stats.digests_offloaded = offloaded_;
  for (const auto& thread : threads_) thread->add_stats(&stats);
  for (const auto& cpu_ns : worker_cpu_ns_) stats.thread_cpu_ns += cpu_ns;
  return stats;
}

bool Engine::window_stats(u32 thread, WindowStats* out) const {
  if (thread >= n_threads_) return false;
  *out = threads_[thread]->window_stats();
  return true;
}

// Handles the end of a command of a layer, digests included: advances the watermark over finished
// layers.
void Engine::layer_command_ended(Job* job, u32 layer) {
  if (--job->layer_left[layer] != 0) return;
  std::lock_guard<std::mutex> lock(job->mutex);
  if (job->done) return;
  const u32 before = job->layers_ready;
  u32 ready = before;
  while (ready < job->n_layers && job->layer_left[ready] == 0) ++ready;
  if (ready == before) return;
  if (job->config.layer_ns != 0) {
    const u64 now = threads_[0]->clock_ns();
    for (u32 i = before; i < ready; ++i) at<u64>(job->config.layer_ns)[i] = now;
  }
  tell_layers(job, before, ready);
  if (ready == job->n_layers) end(job);
  job->layers_ready = ready;
  if (ready >= job->report_at) report(job);
  notify(job);
}

void Engine::mark_pages(Job* job, u32 first, u32 end, u32 status) {
  u32 none = 0;
  job->status.compare_exchange_strong(none, status);  // pairs with gio_job_report's load
  if (!job->has_pages || job->config.page_status == 0) return;
  end = std::min(end, job->config.iocb.n_pages);
  for (u32 i = first; i < end; ++i) set_once(&at<u32>(job->config.page_status)[i], status);
}

// Fails a job: releases its waiters, and sets this status for every page without one, because no
// page is complete before the job's last layer.
void Engine::abandon(Job* job, u32 status) {
  {
    std::lock_guard<std::mutex> lock(job->mutex);
    if (job->done) return;
    mark_pages(job, 0, job->config.iocb.n_pages, status);
    tell_layers(job, job->layers_ready, job->n_layers);
    job->gate = true;
    end(job);
  }
  notify(job);
  attend();
}

// Ends a job whose outcome is known.  The job's mutex must be held.
void Engine::end(Job* job) {
  job->done_ns = monotonic_ns();
  job->done = true;
}

void Engine::drop(Job* job) {
  if (--job->refs != 0) return;
  if (job->next != nullptr && job->status == 0 && follow(job)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (job->before != nullptr) job = job->before;
    job->released = true;
    released_.splice(released_.end(), job->place);  // the job may be freed from here on
  }
  released_came_.notify_all();
}

// After a job that succeeded: begins the one that follows it; false if the engine stops.
bool Engine::follow(Job* job) {
  reinterpret_cast<void (*)(u64)>(job->config.before_then)(job->config.context);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) {
      mark_pages(job, 0, job->config.iocb.n_pages, kCancelled);
      return false;
    }
    begin(&job->next->job, &job->next->parts);
  }
  drop(&job->next->job);
  return true;
}

// Wakes waiters of a job after layers became ready or it ended, if one waits for so few layers.
// Not under the mutex: a waiter that wakes up at once would have to sleep again.
void Engine::notify(Job* job) {
  const u32 waited = job->waited;  // pairs with wait_layers, which writes it before it looks
  if (waited == ~0u || (!job->done && job->layers_ready < waited)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job->waited = ~0u;  // a waiter that wakes up and waits on sets it again
  }
  changed_.notify_all();
}

}  // namespace gio

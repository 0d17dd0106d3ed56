// The host engine: turns I/O control blocks into NVMe commands, drives the controller inline and
// reports readiness layer by layer.
//
// Each drive has a service thread, with a queue pair and a window of its own.  A job is shared by
// the service threads whose drives have a part of it.  Digests are computed by a small pool of
// workers, and by the service thread when it has nothing else to do or when a layer is urgent.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "controller.h"
#include "gio_uring/iocb.h"
#include "gio_uring/layer_words.h"

namespace gio {

// Lower ones go first.  0: records and metadata, small and waited for; 1: loads; 2: stores.
enum Priority : u32 { kRecords = 0, kLoads = 1, kStores = 2, kPriorities = 3 };

enum DigestMode : u32 { kDigestNone = 0, kDigestCompute = 1, kDigestCompare = 2 };

constexpr u64 kReport = u64{1} << 63;  // with a tag of gio_engine_next: layers arrived

// Plain data, mirrored by tutti/gio_uring/engine_structs.py, as are all structs up to Completed.
// The arrays must stay valid, at the same address, until the job is released.
struct JobConfig {
  Iocb iocb;
  u64 digests;      // u64[n_pages][n_layers], written (compute) or read (compare); or 0
  u64 page_status;  // u32[n_pages], zeroed by the caller; the first error of a page stays; or 0
  u64 tag;          // returned by gio_engine_next
  u64 timeout_ns;   // how long one command may be outstanding
  u32 priority;     // Priority; lower ones are issued first
  u32 digest;       // DigestMode
  u32 gated;        // compare only: digests are not read before gio_job_open_gate
  u32 window;       // with words: layer l is issued once `moved` + window > l
  u64 words;        // LayerWords for a mover, zeroed by the caller; or 0
  u64 layer_ns;     // u64[n_layers], when each layer became ready, by the controller's clock; or 0
  u32 held;         // 1 + layers to issue before gio_job_grant, or timeout_ns; 0: all
  u32 ahead;        // loads: 1: after those that are waited for, until this is waited for too
  u64 then;  // JobConfig* of what begins once all of this went well, and is released with it; or 0
  u64 before_then;  // void(u64 context), called before, on whatever thread ended this
  u64 context;
};
static_assert(sizeof(JobConfig) == 216, "layout shared with Python");

struct JobReport {
  u64 submitted_ns;  // CLOCK_MONOTONIC
  u64 done_ns;       // 0 while not done
  u32 layers_ready;
  u32 done;      // every layer is ready or failed; waiters were released
  u32 released;  // and no command of it is outstanding: its memory is the caller's again
  u32 status;    // first error, or 0
};

struct ServiceThreadConfig {
  u64 controller;  // Controller*
  u64 queue_pair;  // QueuePair*
  u64 lists;       // one descriptor list of list_nbytes for each CID
};

struct Route {
  u32 thread;
  u32 nsid;  // of the thread's controller
};

struct EngineConfig {
  u64 threads;  // ServiceThreadConfig[n_threads]
  u64 routes;   // Route[n_routes], of namespace i + 1
  u32 n_threads;
  u32 n_routes;
  u32 list_nbytes;
  u32 digest_workers;
  u64 window_nbytes;  // of each service thread; 0 = found while it runs
};
static_assert(sizeof(EngineConfig) == 40, "layout shared with Python");

// Totals since the engine started.
struct EngineStats {
  u64 commands;
  u64 bytes_read;
  u64 bytes_written;
  u64 jobs;
  u64 timeouts;
  u64 thread_cpu_ns;  // of all service threads and digest workers
  u64 digest_ns;
  u64 digests_offloaded;  // commands whose digests, or the last of them, were a worker's
};

// Statistics of a service thread, and measurements of its drive; index 0 is for reads, 1 for
// writes.
struct WindowStats {
  u64 window_nbytes[2];  // of commands of the last size; while layers are waited for, if any were
  u64 rate[2];           // bytes per second of the last sample with a full window; 0 = none yet
  u64 latency_ns[2];     // of commands, smoothed
  u64 samples[2];
  u64 inflight_nbytes;
  u64 commands;  // totals since the engine started
  u64 bytes_read;
  u64 bytes_written;
};
static_assert(sizeof(WindowStats) == 96, "layout shared with Python");

struct Completed {
  u32 layer;
  u32 run;
  u32 status;
};

// Model of a consumer, which waits for a job's layers, one or a few at a time, and computes in
// between.  Written by waiting threads, read by service threads.
class Consumer {
 public:
  // What it is expected to take per layer, as those before it; 0 if unknown.
  void expect(u64 pace_ns) { expected_ns_ = pace_ns; }
  u64 expected_ns() const { return expected_ns_; }
  // The consumer waits for `layers` layers from now on.
  void asks(u32 layers, u64 now_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (layers <= asked_) return;
    if (has_ != 0) busy_ns_ += now_ns - has_ns_;
    if (has_ != 0) pace_ns_ = busy_ns_ / (layers - first_) + 1;
    asked_ = layers;
  }
  void gets(u32 layers, u64 now_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (layers <= has_) return;
    if (has_ == 0) first_ = layers;
    has_ns_ = now_ns;
    has_ = layers;
  }
  u32 asked() const { return asked_; }
  // Average time that the consumer takes per layer; 0 if unknown.
  u64 pace_ns() const { return pace_ns_; }
  // Time until the consumer has used the first `ready` layers.
  u64 busy_ns(u32 ready, u64 now_ns) const {
    const u32 has = has_;
    const u64 next_ns = pace_ns_ * (ready - std::min(ready, has));
    if (asked_ > has) return next_ns;  // it waits, or is about to have them
    const u64 end_ns = has_ns_ + pace_ns_;
    return next_ns + end_ns - std::min(end_ns, now_ns);
  }

 private:
  u64 expected_ns_ = 0;
  std::mutex mutex_;           // of the writers
  std::atomic<u32> asked_{0};  // layers, the most
  std::atomic<u32> has_{0};
  std::atomic<u64> has_ns_{0};
  std::atomic<u64> pace_ns_{0};
  std::atomic<u64> busy_ns_{0};  // since it got its first
  std::atomic<u32> first_{0};    // layers
};

struct Next;

constexpr u32 kLastCommands = 2;  // of a layer, whose digests it waits for

// The submitter allocates everything that service threads and workers need for a job: they never
// allocate, so that lack of memory cannot end them.
struct Job {
  explicit Job(const JobConfig& c);
  ~Job();
  // Whether something waits for this layer of a load, or will wait for it next, and for its last
  // commands alone: digests of those before are computed while the drive reads on.
  bool is_urgent(u32 layer) const {
    const u32 asked = consumer.asked();
    return config.digest == kDigestCompare && !ahead && (layer == asked || layer + 1 == asked) &&
           layer_left[layer] <= kLastCommands;
  }

  const JobConfig config;
  const Run* const runs;
  const u32 n_layers;
  const bool has_pages;                            // reads and writes
  bool whole_slices;                               // no run splits a slice
  const bool digests_early;                        // while the commands are under way
  std::unique_ptr<std::atomic<u32>[]> layer_left;  // commands and early digests to end, by layer
  std::vector<u32> slice_left;  // blocks not yet moved, [layer][page]; empty if whole_slices
  const u64 submitted_ns;
  std::mutex mutex;       // of the step from one watermark to the next, and of the end
  std::atomic<u32> refs;  // its submitter, service threads at work on it, digests under way
  std::atomic<bool> gate;
  std::atomic<bool> cancel{false};
  std::atomic<u32> layers_ready{0};
  std::atomic<u32> waited{~0u};  // the fewest layers that a waiter sleeps for
  Consumer consumer;
  std::atomic<bool> ahead;  // nothing has waited for its layers yet
  std::atomic<u32> status{0};
  std::atomic<bool> done{false};
  std::atomic<bool> released{false};
  std::atomic<u64> done_ns{0};
  std::list<u64> place;             // its tag, for Engine::released_
  std::atomic<u32> granted;         // layers that may be issued
  std::atomic<u32> report_at{~0u};  // layers ready at which the submitter is told, once
  std::list<u64> report;            // its tag with kReport, likewise
  std::unique_ptr<Next> next;       // of config.then
  Job* before = nullptr;            // the job that this one follows
};

class ServiceThread;
struct Part;

// A task: to hash slices [first, end) of a command that ended.
struct DigestTask {
  Job* job;
  u32 layer;
  u32 first;
  u32 end;
};

class Engine {
 public:
  // The service threads' memory belongs to the caller and must outlive the engine; the controllers
  // must have been claimed.
  explicit Engine(const EngineConfig& config);
  ~Engine();

  // 0 and the job, or -ESHUTDOWN after stop().
  int submit(const JobConfig& config, Job** out);
  // Waits until `layers` layers are ready or the job is done: 0, or -ETIMEDOUT.
  int wait_layers(Job* job, u32 layers, u64 timeout_ns);
  int wait_released(const Job* job, u64 timeout_ns);
  void open_gate(Job* job);
  void cancel(Job* job);
  // Permits the first `layers` layers to be issued; gio_engine_next reports once `report_at` are
  // ready.
  void grant(Job* job, u32 layers, u32 report_at);
  // The tag of the next released job, in order of release, or of a report; 0 after the timeout; all
  // ones once the threads have ended and every job was returned.
  u64 next_released(u64 timeout_ns);
  // Makes the service threads reset their controllers; 0 when nothing is outstanding any more.
  int reset(u64 timeout_ns);
  // Ends the threads.  Resets the controllers if commands are outstanding after the deadline;
  // -EBUSY if that fails: the memory must not be freed then.
  int stop(u64 timeout_ns);
  EngineStats stats() const;
  bool window_stats(u32 thread, WindowStats* out) const;

 private:
  friend class ServiceThread;

  // Called by service threads and workers.
  void digest(const DigestTask& task);
  bool offer(const DigestTask& task);  // false: too many wait
  DigestTask take();
  bool has_workers() const { return !workers_.empty(); }
  bool is_hashing_on(int processor) const;
  void layer_command_ended(Job* job, u32 layer);
  void mark_pages(Job* job, u32 first, u32 end, u32 status);
  void abandon(Job* job, u32 status);
  void drop(Job* job);
  bool follow(Job* job);
  void begin(Job* job, std::vector<std::list<Part>>* parts);
  void thread_ended();
  u32 local_nsid(u32 nsid) const {
    return nsid - 1 < routes_.size() ? routes_[nsid - 1].nsid : nsid;
  }

  void digest_slice(Job* job, u32 layer, u32 page_index);
  void tell_layers(Job* job, u32 from, u32 to);
  void report(Job* job);
  u64 clock_ns();
  u64 usual_pace_ns() const;
  void end(Job* job);
  void attend();
  void notify(Job* job);
  void work(std::atomic<u64>* cpu_ns);
  void end_workers();
  std::vector<std::list<Part>> split(Job* job) const;
  template <typename Ready>
  int wait(std::condition_variable* changed, u64 timeout_ns, Ready ready);

  static constexpr u32 kConsumers = 8;
  static constexpr u32 kWaitingTasks = 64;  // per service thread: its whole window may end at once

  const u32 n_threads_;
  std::vector<Route> routes_;
  std::vector<std::unique_ptr<ServiceThread>> threads_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // layers, resets, the end
  std::list<u64> released_;
  std::condition_variable released_came_;
  std::atomic<bool> stop_{false};
  u32 threads_left_;
  bool exited_ = false;
  u64 paces_ns_[kConsumers] = {};  // of the last consumers, by number
  u32 n_consumers_ = 0;
  std::atomic<u64> jobs_{0};
  std::atomic<u64> digest_ns_{0};
  std::atomic<u64> offloaded_{0};

  std::mutex tasks_mutex_;
  std::condition_variable task_came_;
  std::vector<DigestTask> tasks_;  // the first one first; never more than were reserved
  bool workers_end_ = false;
  std::vector<std::thread> workers_;
  std::vector<std::atomic<u64>> worker_cpu_ns_;  // by worker
};

u64 thread_cpu_ns();

}  // namespace gio

extern "C" {
// 0; -EBUSY if another engine, or a controller's own thread, serves one of the controllers; -ENOMEM
// or -EAGAIN without memory or threads.
TUTTI_API int gio_engine_create(const gio::EngineConfig*, gio::Engine** out);
// See Engine::submit; -ENOMEM without memory for the job.
TUTTI_API int gio_engine_submit(gio::Engine*, const gio::JobConfig*, gio::Job** out);
TUTTI_API int gio_job_wait_layers(gio::Engine*, gio::Job*, uint32_t layers, uint64_t timeout_ns);
TUTTI_API int gio_job_wait_released(gio::Engine*, gio::Job*, uint64_t timeout_ns);
TUTTI_API void gio_job_open_gate(gio::Engine*, gio::Job*);
TUTTI_API void gio_job_cancel(gio::Engine*, gio::Job*);
// See Engine::grant; -ENOMEM without memory for the report.
TUTTI_API int gio_job_grant(gio::Engine*, gio::Job*, uint32_t layers, uint32_t report_at);
TUTTI_API void gio_job_report(const gio::Job*, gio::JobReport* out);
TUTTI_API void gio_job_free(gio::Job*);  // after it was released
TUTTI_API uint64_t gio_engine_next(gio::Engine*, uint64_t timeout_ns);
TUTTI_API int gio_engine_reset(gio::Engine*, uint64_t timeout_ns);
TUTTI_API int gio_engine_stop(gio::Engine*, uint64_t timeout_ns);
TUTTI_API void gio_engine_stats(const gio::Engine*, gio::EngineStats* out);
TUTTI_API int gio_engine_window(const gio::Engine*, uint32_t thread, gio::WindowStats* out);
TUTTI_API void gio_engine_destroy(gio::Engine*);  // after stop returned 0
}

// The host engine: one native thread that turns I/O control blocks into NVMe commands, rings,
// drives the controller inline and reports readiness layer by layer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "controller.h"
#include "gio_uring/iocb.h"
#include "gio_uring/layer_words.h"
#include "job_list.h"

namespace gio {

// 0: records and metadata, small, and others wait for them; 1: loads; 2: stores.
constexpr u32 kPriorities = 3;

enum DigestMode : u32 { kDigestNone = 0, kDigestCompute = 1, kDigestCompare = 2 };

// Plain data, mirrored by tutti/gio_uring/engine.py.  The arrays stay valid and unmoved until
// the job is released.
struct JobConfig {
  Iocb iocb;
  u64 digests;      // u64[n_pages][n_layers], written (compute) or read (compare); or 0
  u64 page_status;  // u32[n_pages], zeroed by the caller; the first error of a page stays; or 0
  u64 tag;          // returned by gio_engine_next
  u64 timeout_ns;   // how long one command may be outstanding
  u32 priority;     // lower ones are issued first
  u32 digest;       // DigestMode
  u32 gated;        // compare only: digests are not read before gio_job_open_gate
  u32 window;       // with words: layer l is issued once `moved` + window > l
  u64 words;        // LayerWords for a mover, zeroed by the caller; or 0
};
static_assert(sizeof(JobConfig) == 176, "layout shared with Python");

struct JobReport {
  u64 submitted_ns;  // CLOCK_MONOTONIC
  u64 done_ns;       // 0 while not done
  u32 layers_ready;
  u32 done;      // every layer is ready or failed; waiters were released
  u32 released;  // and no command of it is outstanding: its memory is the caller's again
  u32 status;    // first error, or 0
};

struct EngineStats {
  u64 commands;
  u64 bytes_read;
  u64 bytes_written;
  u64 jobs;
  u64 timeouts;
  u64 thread_cpu_ns;
  u64 digest_ns;
};

struct Completed {
  u32 layer;
  u32 run;
  u32 status;
};

// Everything that the engine's thread needs for a job is allocated here: the thread never asks for
// memory, so that nothing can end it.
struct Job {
  explicit Job(const JobConfig& c);

  const JobConfig config;
  const Run* const runs;
  const u32 n_layers;
  bool whole_slices;                // no run splits a slice
  std::vector<u32> layer_left;      // commands not yet finished, by layer
  std::vector<u32> slice_left;      // blocks not yet moved, [layer][page]; empty if whole_slices
  std::vector<Completed> deferred;  // finished, but the gate is closed
  u64 next_command = 0;             // layer-major
  u64 n_commands;
  u32 outstanding = 0;
  u64 blocked_ns = 0;   // since when the mover is behind
  bool queued = false;  // was handed to waiters of gio_engine_next
  std::atomic<bool> gate;
  std::atomic<bool> cancel{false};

  std::atomic<u32> layers_ready{0};
  std::atomic<u32> status{0};
  std::atomic<bool> done{false};
  std::atomic<bool> released{false};
  u64 submitted_ns;
  std::atomic<u64> done_ns{0};

  JobLink place;  // incoming, ready, blocked or released
  JobLink gated;
};

class Engine {
 public:
  // `ring_memory` is the queue pair's and `lists` one descriptor list of `list_nbytes` per CID;
  // both stay the caller's and outlive the engine.  The controller was claimed for it.
  Engine(Controller* controller, QueuePair* qp, u64 lists, u32 list_nbytes, u32 inflight_max);
  ~Engine();

  // 0 and a job that was taken over, or -ESHUTDOWN after stop().
  int submit(const JobConfig& config, Job** out);
  // Waits until `layers` layers are ready or the job is done: 0, or -ETIMEDOUT.
  int wait_layers(const Job* job, u32 layers, u64 timeout_ns);
  int wait_released(const Job* job, u64 timeout_ns);
  void open_gate(Job* job);
  void cancel(Job* job);
  // The next released job in order of release: its tag; 0 after the timeout; all ones once the
  // thread has ended and every job was reported.
  u64 next_released(u64 timeout_ns);
  // Asks the thread to reset the controller; 0 when nothing is outstanding any more.
  int reset(u64 timeout_ns);
  // Ends the thread.  Commands still outstanding after the deadline are reset away; -EBUSY when
  // even that failed and the memory must not be freed.
  int stop(u64 timeout_ns);
  EngineStats stats() const;

 private:
  struct Command {
    Job* job = nullptr;
    u32 layer = 0;
    u32 run = 0;
    u64 deadline_ns = 0;
    bool timed_out = false;
  };

  void loop();
  void accept();
  Job* next_incoming();
  bool issue(u64 now);
  bool issue_one(Job* job, u64 now);
  Job* next_job();
  void reap();
  void check_deadlines(u64 now);
  void finish(Job* job, const Completed& completed);
  void digest_slices(Job* job, const Completed& completed);
  void digest_slice(Job* job, u32 layer, u32 page_index);
  void mark_pages(Job* job, const Run& run, u32 status);
  void advance(Job* job);
  bool may_issue(const Job* job) const;
  void run_blocked(u64 now);
  void tell_layers(Job* job, u32 from, u32 to);
  void abandon(Job* job, u32 status);
  void maybe_release(Job* job);
  void run_gates();
  void notify();

  Controller* controller_;
  QueuePair* qp_;
  u64 lists_;
  u32 list_nbytes_;
  u32 inflight_max_;
  u32 inflight_ = 0;
  u32 inflight_late_ = 0;  // of the last priority
  u64 next_check_ns_ = 0;
  std::vector<Command> commands_;  // by CID
  std::vector<u32> active_;        // CIDs in flight
  std::vector<std::pair<Job*, Completed>> finished_;
  std::vector<std::pair<Job*, Completed>> finishing_;  // of this turn
  JobList<&Job::gated> gated_;
  JobList<&Job::place> blocked_;  // have commands to issue, once their mover allows
  u64 mover_ns_ = 0;
  JobList<&Job::place> ready_[kPriorities];  // jobs with commands to issue

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  JobList<&Job::place> incoming_;
  JobList<&Job::place> released_;
  std::atomic<u32> waiters_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> gate_opened_{false};
  bool reset_wanted_ = false;
  u64 reset_timeout_ns_ = 0;
  int reset_result_ = 0;
  bool exited_ = false;
  std::atomic<u64> stats_[7];
  std::thread thread_;
};

}  // namespace gio

extern "C" {
// 0; -EBUSY while another engine, or its own thread, serves the controller; -ENOMEM or -EAGAIN
// without memory or threads.
TUTTI_API int gio_engine_create(gio::Controller*, gio::QueuePair*, uint64_t lists,
                                uint32_t list_nbytes, uint32_t inflight_max, gio::Engine** out);
// See Engine::submit; -ENOMEM without memory for the job.
TUTTI_API int gio_engine_submit(gio::Engine*, const gio::JobConfig*, gio::Job** out);
TUTTI_API int gio_job_wait_layers(gio::Engine*, gio::Job*, uint32_t layers, uint64_t timeout_ns);
TUTTI_API int gio_job_wait_released(gio::Engine*, gio::Job*, uint64_t timeout_ns);
TUTTI_API void gio_job_open_gate(gio::Engine*, gio::Job*);
TUTTI_API void gio_job_cancel(gio::Engine*, gio::Job*);
TUTTI_API void gio_job_report(const gio::Job*, gio::JobReport* out);
TUTTI_API void gio_job_free(gio::Job*);  // after it was released
TUTTI_API uint64_t gio_engine_next(gio::Engine*, uint64_t timeout_ns);
TUTTI_API int gio_engine_reset(gio::Engine*, uint64_t timeout_ns);
TUTTI_API int gio_engine_stop(gio::Engine*, uint64_t timeout_ns);
TUTTI_API void gio_engine_stats(const gio::Engine*, gio::EngineStats* out);
TUTTI_API void gio_engine_destroy(gio::Engine*);  // after stop returned 0
}

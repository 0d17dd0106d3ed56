// The service thread of one drive of the host engine: its queue pair and its commands.
#pragma once

#include <list>
#include <set>
#include <vector>

#include "engine.h"
#include "window.h"

namespace gio {

// The part of a job on one service thread.  Used only by that thread.
struct Part {
  explicit Part(Job* its_job) : job(its_job), place(of_its_own()) {}

  // The key by which parts with commands to issue are ordered.
  struct Turn {
    u64 due_ns;
    u64 order;
    Part* part;
    bool operator<(const Turn& other) const {
      return due_ns != other.due_ns ? due_ns < other.due_ns : order < other.order;
    }
  };
  using Turns = std::set<Turn>;

  Job* const job;
  Turns::node_type place;            // while the part is in none of ServiceThread's Turns
  std::list<Part>::iterator itself;  // in ServiceThread::parts_
  std::vector<u32> runs;             // indices of the job's runs, in order; empty: all of them
  u32 n_runs = 0;
  u64 next = 0;            // command, layer-major
  u64 group_end = 0;       // those before it are issued together, and others not before
  u64 group_until_ns = 0;  // all of them have ended, or then
  u64 n_commands = 0;
  u64 order = 0;         // of arrival
  u64 due_ns = 0;        // of layer 0
  u64 interval_ns = 0;   // from layer to layer
  u64 layer_nbytes = 0;  // of this thread's part
  u64 blocked_ns = 0;    // since when the mover is behind
  u32 outstanding = 0;
  u32 in_flight = 0;                // of these, those that the drive has
  bool has_begun = false;           // a load that may be issued
  bool is_ahead = false;            // nothing waited for its layers when it was last listed
  bool is_due = false;              // counted in ServiceThread::loads_due_
  bool from_idle = false;           // nothing was in flight when its first command was issued
  std::vector<Completed> deferred;  // finished, but the gate is closed

 private:
  static Turns::node_type of_its_own() {
    Turns one = {{0, 0, nullptr}};
    return one.extract(one.begin());
  }
};

class ServiceThread {
 public:
  ServiceThread(Engine* engine, const ServiceThreadConfig& config, u32 list_nbytes,
                u64 window_nbytes);
  ~ServiceThread();
  void start();

  void push(std::list<Part>* part);  // takes it; the engine's mutex is held
  void attend() {
    is_attended_ = false;
    controller_->wake();
  }
  void want_reset(u64 timeout_ns);  // the engine's mutex is held; finish_reset once is_reset()
  bool is_reset() const { return !reset_wanted_; }
  int reset_result() const { return reset_result_; }
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  void add_stats(EngineStats* stats) const;
  WindowStats window_stats() const;
  u64 clock_ns() const { return controller_->clock_ns(monotonic_ns()); }
  int hashes_on() const { return hashes_on_.load(std::memory_order_relaxed); }

 private:
  struct Command {
    Part* part = nullptr;
    u32 layer = 0;
    u32 run = 0;
    u64 nbytes = 0;
    u64 issued_ns = 0;
    u64 deadline_ns = 0;
    u32 kind = 0;
    bool is_alone = false;  // from its beginning until now
    bool timed_out = false;
  };
  struct Finished {
    Part* part;
    Completed completed;
  };
  enum Stat { kCommands, kBytesRead, kBytesWritten, kTimeouts, kCpu, kStats };
  // Commands of the same direction and of similar size share a window.
  static constexpr u32 kSizes = 4;
  static constexpr u32 kKinds = 2 * kSizes;
  static constexpr u32 kAlways = 256;
  static constexpr int kNowhere = -2;
  static constexpr u64 kAloneNbytes = 512 << 10;  // less is hashed before a worker has woken up
  static constexpr u64 kOpeningNs = 200'000'000;  // how long a load may keep all others waiting
  static u32 kind_of(u32 opcode, u64 nbytes);

  void loop();
  bool must_run();
  void accept();
  void begin_load(Part* part, u64 clock_ns);
  void end_due(Part* part);
  void list(Part* part);
  void relist(Part* part);
  Window& window_of(u32 kind) { return windows_[loads_due_ != 0 ? 1 : 0][kind]; }
  u64 window(u32 kind);
  bool is_full(Part* part, u32 kind, u64 nbytes);
  bool begins_slowly(const Part& part) const;
  bool comes_in_groups(const Part& part) const;
  void begin_group(Part* part, u32 kind, u64 nbytes);
  bool reports_together() const { return together_ > kAlways / 2; }
  u64 alone_ns(u32 kind) const;
  void start_windows();
  void interrupt(u32 kind);
  bool issue(u64 now, u64 clock_ns);
  bool hashes_urgently() const;
  Part* pick();
  bool send(u32 cid, const Command& command);
  void reap(u64 clock_ns);
  void measure(const Command& command, u32 status, u64 clock_ns);
  void publish_windows();
  void check_deadlines(u64 now);
  void finish(Part* part, const Completed& completed);
  void digest_command(Part* part, const Completed& completed);
  void hash(const DigestTask& task);
  void help();
  bool hash_piece();
  bool may_issue(const Part& part) const;
  bool is_granted(const Part& part) const;
  void list_granted();
  void run_blocked(u64 now);
  void run_attention();
  void maybe_drop(Part* part);
  void count(Stat stat, u64 n) {  // one writer: no read-modify-write needed
    stats_[stat].store(stats_[stat].load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }

  Engine* const engine_;
  Controller* const controller_;
  QueuePair* const qp_;
  const u64 lists_;
  const u32 list_nbytes_;
  const u64 fixed_window_;
  std::vector<Command> commands_;  // by CID
  std::vector<u32> active_;        // CIDs in flight
  u64 inflight_nbytes_ = 0;
  u64 inflight_late_ = 0;      // bytes of stores
  Part* opening_ = nullptr;    // a load that found the drive idle, until a window was moved
  u64 opening_ns_ = 0;         // when it began
  u64 opening_end_ns_ = 0;     // when it ends at the latest, by the monotonic clock
  u64 opening_nbytes_ = 0;     // moved since
  u64 opening_rate_ = 0;       // bytes per second, of such loads
  u32 n_openings_ = 0;         // such loads
  u32 together_ = 0;           // how often all commands in flight are reported at once, of kAlways
  bool wants_alone_ = false;   // one of its commands, to see how long it takes
  u64 alone_ns_[kKinds] = {};  // time of a command with no other in flight
  std::vector<Finished> finished_;
  std::vector<Finished> to_digest_;  // issued in this turn
  bool helps_ = false;               // to hash what it offered to workers: it is urgent
  bool shares_ = false;              // to hash it when it would sleep: some of it may wait
  std::list<Part> parts_;
  Part::Turns ready_[kPriorities];  // have commands to issue
  Part::Turns blocked_;             // have some, once their mover allows
  Part::Turns held_;                // likewise, once their submitter does
  u64 mover_ns_ = 0;
  u64 order_ = 0;
  u32 loads_due_ = 0;             // parts with layers that are waited for
  bool is_full_ = false;          // the window, when issuing ended
  bool waits_for_group_ = false;  // likewise: it was not the window that was full
  bool is_slow_ = false;          // likewise: a store that begins slowly waits
  u64 next_check_ns_ = 0;
  Window windows_[2][kKinds];  // while no layer is waited for, and while one is
  u32 kind_ = kSizes - 1;      // of the last command
  u32 kind_of_direction_[2] = {kSizes - 1, kKinds - 1};
  u64 latency_ns_[2] = {0, 0};

  // Guarded by the engine's mutex.
  std::list<Part> incoming_;
  bool reset_wanted_ = false;
  u64 reset_timeout_ns_ = 0;
  int reset_result_ = 0;

  u64 next_move_ns_ = 0;
  std::atomic<int> hashes_on_{kNowhere};  // processor
  std::atomic<bool> is_attended_{true};
  std::atomic<u64> stats_[kStats] = {};
  std::atomic<u64> window_stats_[sizeof(WindowStats) / sizeof(u64)] = {};
  std::thread thread_;
};

}  // namespace gio

// A controller whose medium is memory: for tests, for measuring the protocol without a drive, and
// for a virtual clock.  It can inject the faults of drives.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "controller.h"

namespace gio {

enum MemoryMode : u32 {
  kModeCopy = 0,
  kModeZeroCopy = 1,  // checks and completes, moves nothing: the medium is the staging
  kModeVirtual = 2,   // copies at times of a virtual clock, which service() moves
};

// Plain data, mirrored by tutti/gio_uring/controller_memory.py, as are all structs below.
struct MemoryConfig {
  u64 namespace_nlb;         // u64[namespaces]
  u64 read_bandwidth;        // bytes per second of virtual time
  u64 write_bandwidth;       // bytes per second of virtual time
  u64 latency_ns;            // of every command, in virtual time
  u32 interference_percent;  // duration of a transfer while the other direction is busy; 100 = same
  u32 namespaces;
  u32 lba_shift;
  u32 mdts_nbytes;
  u32 sgl_descriptors;
  u32 depth_max;
  u32 mode;        // MemoryMode
  u32 write_back;  // 1: a volatile write cache that power_cut may lose
  // Properties of the drive on the virtual clock.
  u64 channel_bandwidth;  // bytes per second of one of its channels
  u32 channels;           // that each move one transfer at a time; 0 = as many as there are
  u32 crowd;              // with more transfers in flight than this each takes
  u32 crowd_percent;      // so much of its time; 0 = no matter how many
  u32 is_shared;          // 1: transfers in flight share the bandwidth, and end with the last one
};
static_assert(sizeof(MemoryConfig) == 88, "layout shared with Python");

// Probabilities are in ppm of commands.  They are drawn from `seed` and the command's number since
// the faults were set, so the same order of commands always has the same faults.
struct FaultConfig {
  u64 seed;
  u64 stall_from;  // this command (1 is the first) and all later ones get no answer; 0 = never
  u32 status_ppm;
  u32 status;  // answered instead of executing
  u32 delay_ppm;
  u32 delay_turns;   // executed 1 to this many turns of service() later
  u32 reorder_ppm;   // executed after the rest of its turn, in random order
  u32 torn_ppm;      // a prefix of a write's blocks lands ...
  u32 torn_status;   // ... and this is the answer; 0 = acknowledged all the same
  u32 lost_ppm;      // a write is acknowledged and not executed
  u32 short_ppm;     // a prefix of the blocks is moved ...
  u32 short_status;  // ... and this is the answer
  u32 reset_fails;   // 1: reset() times out while unanswered commands exist
  u32 reserved;
};
static_assert(sizeof(FaultConfig) == 64, "layout shared with Python");

// Answers `status` to the next `count` commands of an opcode that touch a range.
struct RangeFault {
  u64 slba;
  u64 nlb;
  u32 nsid;
  u32 opcode;
  u32 count;
  u32 status;
};
static_assert(sizeof(RangeFault) == 32, "layout shared with Python");

struct MemoryStats {
  u64 commands;   // fetched
  u64 completed;  // answered
  u64 bytes_read;
  u64 bytes_written;
  u64 faults;      // commands that met one
  u64 unanswered;  // commands that are held back now
};

// The faults of one command.
struct Verdict {
  u32 status = kOk;
  u32 delay_turns = 0;
  u32 percent = 100;  // of the blocks that are moved
  bool is_lost = false;
  bool is_held = false;        // executed later
  bool is_unanswered = false;  // executed when the drive is told to answer again, or never
  u64 order = 0;
};

class FaultPlan {
 public:
  void set(const FaultConfig& config);
  void add(const RangeFault& fault) { ranges_.push_back(fault); }
  bool is_active() const { return is_active_ || !ranges_.empty(); }
  Verdict judge(const Sqe& sqe);

  FaultConfig config{};

 private:
  u32 match_range(const Sqe& sqe);

  std::vector<RangeFault> ranges_;
  u64 n_ = 0;
  bool is_active_ = false;
};

// The writes since the last flush; a power cut loses a subset of them.
class WriteCache {
 public:
  // Records a write; called before the medium changes.  A durable write (FUA) is never lost.
  void note(u32 nsid, u8* target, u64 nbytes, bool is_durable);
  void flush(u32 nsid);
  void power_cut(u64 seed, u64 lba_nbytes);

 private:
  struct Write {
    u32 nsid;
    u8* target;
    std::vector<u8> bytes;  // what was there before
    bool is_durable;
  };
  std::deque<Write> writes_;
  u64 nbytes_ = 0;
};

class MemoryController final : public Controller {
 public:
  explicit MemoryController(const MemoryConfig& config);
  ~MemoryController() override;
  MemoryController(const MemoryController&) = delete;
  MemoryController& operator=(const MemoryController&) = delete;

  // 0, or -ENOMEM.
  int map_medium();

  u32 service(u64 timeout_ns) override;
  void wake() override;
  int reset(u64 timeout_ns) override;
  u64 clock_ns(u64 monotonic_ns) override {
    return config_.mode == kModeVirtual ? now_ns() : monotonic_ns;
  }

  // The functions below may be called by any thread at any time.
  u8* medium(u32 nsid) const;
  void set_faults(const FaultConfig& config);
  void add_fault(const RangeFault& fault);
  void answer_all();
  void power_cut(u64 seed);
  MemoryStats stats();
  u64 now_ns();
  void advance(u64 duration_ns);
  void limit(u64 limit_ns);
  void trace(u64* words, u64 n);

 private:
  struct Held {
    Sqe sqe;
    u32 queue;
    Verdict verdict;
    u64 due_turn;
    u64 due_ns;
    u64 order;
  };
  struct Answer {
    u32 queue;
    u32 cid;
    u32 status;
  };

  u32 turn();
  u32 serve(u32 queue, MemoryMap::Reader* reader);
  bool accept(u32 queue, const Sqe& sqe, Answer* answer, MemoryMap::Reader* reader);
  void hold(u32 queue, const Sqe& sqe, const Verdict& verdict);
  u32 run_held(MemoryMap::Reader* reader);
  u32 post_backlog();
  bool has_backlog(u32 queue) const;
  u32 answer(const Answer& answer);
  u32 execute(const Sqe& sqe, const Verdict& verdict, MemoryMap::Reader* reader);
  u32 transfer(const Sqe& sqe, const Verdict& verdict, MemoryMap::Reader* reader);
  u32 deallocate(const Sqe& sqe, MemoryMap::Reader* reader);
  void write_zeros(u32 nsid, u64 slba, u64 nlb);
  u64 virtual_due_ns(const Sqe& sqe);
  void slow_down(u32 direction, u64 begin_ns, u64 duration_ns);
  bool is_rung() const;

  const MemoryConfig config_;
  std::vector<u8*> medium_;
  std::mutex mutex_;  // everything below, and one turn of work
  FaultPlan faults_;
  WriteCache cache_;
  std::vector<Held> held_;
  std::vector<Held> unanswered_;
  std::deque<Answer> backlog_;    // of full completion queues
  std::vector<u32> outstanding_;  // by queue
  std::vector<Extent> extents_;
  MemoryStats stats_{};
  u64* trace_ = nullptr;  // of commands, see gio_memory_controller_trace
  u64 trace_left_ = 0;
  u64 turn_ = 0;
  u64 now_ns_ = 0;
  u64 limit_ns_ = ~u64{0};         // virtual time does not pass this moment by itself
  u64 busy_until_ns_[2] = {0, 0};  // by direction: reads, writes
  std::vector<u64> channel_until_ns_;

  // Used only by the serving thread.
  bool has_held_ = false;

  std::mutex wake_mutex_;
  std::condition_variable woken_;
  bool is_woken_ = false;
};

}  // namespace gio

extern "C" {
// 0 and a controller that gio_controller_destroy frees; or -EINVAL, -ENOMEM.
TUTTI_API int gio_memory_controller_create(const gio::MemoryConfig*, gio::Controller** out);
// The functions below take only such a controller.  Null for a namespace that does not exist.
TUTTI_API void* gio_memory_controller_medium(gio::Controller*, uint32_t nsid);
TUTTI_API void gio_memory_controller_faults(gio::Controller*, const gio::FaultConfig*);
TUTTI_API void gio_memory_controller_fault_range(gio::Controller*, const gio::RangeFault*);
// Lets the next turn of service() execute and answer stalled commands; pairs with stall_from.
TUTTI_API void gio_memory_controller_release(gio::Controller*);
// Loses or tears a subset of the unflushed writes.  Reset first: held commands are not lost.
TUTTI_API void gio_memory_controller_power_cut(gio::Controller*, uint64_t seed);
TUTTI_API void gio_memory_controller_stats(gio::Controller*, gio::MemoryStats* out);
TUTTI_API uint64_t gio_memory_controller_now_ns(gio::Controller*);
// Advances virtual time while the drive is idle.
TUTTI_API void gio_memory_controller_advance(gio::Controller*, uint64_t duration_ns);
// Virtual time stops at `limit_ns`: commands that are due later stay in flight.
TUTTI_API void gio_memory_controller_limit(gio::Controller*, uint64_t limit_ns);
// Writes (opcode, first LBA) of the next n commands to 2n words, zeroed by the caller; 0 ends that.
TUTTI_API void gio_memory_controller_trace(gio::Controller*, uint64_t* words, uint64_t n);
}

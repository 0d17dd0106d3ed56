// The interface of controllers, which execute NVMe commands.  Everything above is the same for
// memory, files and drives.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "api.h"
#include "gio_uring/controller_queue.h"
#include "gio_uring/queue_pair.h"

namespace gio {

// Plain data, mirrored by tutti/gio_uring/controller.py.
struct ControllerInfo {
  u32 lba_shift;
  u32 namespaces;       // nsid 1..namespaces
  u32 mdts_nbytes;      // largest transfer of one command
  u32 sgl_descriptors;  // most descriptors that one command may have; 0 = PRP only
  u32 flags;            // kHas*
  u32 depth_max;
};
enum ControllerFlags : u32 {
  kHasFua = 1,
  kHasDeallocate = 2,
  kHasVolatileCache = 4,
  kHasPrp = 8,
};

struct Extent {
  u64 address;
  u64 nbytes;
};

// The memory that commands may use.  The "DMA address" of a byte is its virtual address, and memory
// outside registered regions is never accessed.
class MemoryMap {
 public:
  // 0, or -EEXIST for an overlap, -EINVAL for an empty or wrapping region.
  int add(u64 address, u64 nbytes);
  // 0, or -ENOENT.  No command may use the region any more.
  int remove(u64 address);

  // Read access to the regions while commands are decoded.
  class Reader {
   public:
    explicit Reader(const MemoryMap& map) : lock_(map.mutex_), regions_(map.regions_) {}
    bool contains(u64 address, u64 nbytes);

   private:
    std::lock_guard<std::mutex> lock_;
    const std::vector<Extent>& regions_;
    size_t last_ = 0;
  };

 private:
  mutable std::mutex mutex_;
  std::vector<Extent> regions_;  // sorted, disjoint
};

// Decodes a command's data pointer (SGL or PRP).  Fills `extents`, joined if contiguous, whose
// lengths add up to `nbytes`; or returns the NVMe status that a drive would return.  Reads at most
// `descriptors_max` descriptors, and only from registered memory.
u32 decode_data_pointer(const Sqe& sqe, u64 nbytes, u32 descriptors_max, MemoryMap::Reader* memory,
                        std::vector<Extent>* extents);

class Controller {
 public:
  Controller();
  virtual ~Controller() = default;

  // Does one turn of work: fetches SQEs from every attached queue pair, executes them and posts
  // CQEs.  Sleeps up to timeout_ns if there is nothing to do.  Returns the number of CQEs posted.
  // Called by one thread at a time (the caller's own, or start()'s).
  virtual u32 service(u64 timeout_ns) = 0;

  // Makes a sleeping service() return soon.  Any thread, at any time.
  virtual void wake() = 0;

  // Ends every outstanding command, with kAbortedSqDeletion or its real status.  Returns 0 when no
  // registered memory is accessed and no medium is written any more, or -ETIMEDOUT when commands
  // are still outstanding and may use their memory.  Called by the thread that calls service(), or
  // by any thread while none does.
  virtual int reset(u64 timeout_ns) = 0;

  // Reports that a command of an attached queue pair has passed its deadline.  Called again every
  // few milliseconds until it ends, by the thread that calls service(); the deadline distinguishes
  // commands with the same CID.
  virtual void late(const QueuePair& qp, u32 cid, u64 deadline_ns) {
    (void)qp;
    (void)cid;
    (void)deadline_ns;
  }

  // Reports that a late command has ended; called before another command can get its CID.
  virtual void late_ended(const QueuePair& qp, u32 cid) {
    (void)qp;
    (void)cid;
  }

  // The clock for measuring a drive's speed: CLOCK_MONOTONIC, or a virtual clock.
  virtual u64 clock_ns(u64 monotonic_ns) { return monotonic_ns; }

  // One namespace's size in LBAs; 0 for a namespace that does not exist.
  u64 namespace_nlb(u32 nsid) const {
    return nsid >= 1 && nsid <= namespace_nlb_.size() ? namespace_nlb_[nsid - 1] : 0;
  }

  // Adds a queue pair, which the next turn of service() serves.  Callable by any thread, also while
  // another one serves.  0, or -ENOSPC beyond 64, -EINVAL for a bad depth.
  int attach(const QueuePair& qp);
  // Removes a queue pair with nothing outstanding, or whose controller was reset.  0, -ENOENT, or
  // -ETIMEDOUT if the serving thread has not confirmed it, and may still access the rings.
  int detach(const QueuePair& qp, u64 timeout_ns);

  // Submitters that cannot wake the thread, such as a GPU, begin (+1) or end (-1) their work.
  // While there are any, service() sleeps only for microseconds between polls of the doorbells.
  void expect_rings(int change) {
    pollers_ += change;
    if (change > 0) wake();
  }

  // Claims the controller for a thread that calls service() in a loop, an engine's or start()'s.
  // False if another one has it.
  bool claim() { return !is_claimed_.exchange(true); }
  void unclaim() { is_claimed_ = false; }
  bool is_claimed() const { return is_claimed_; }

  // Runs service() on a thread of its own, for submitters without one (GPU, benchmarks).
  int start();
  void stop();

  ControllerInfo info{};
  MemoryMap memory;

 protected:
  // The checks of every controller: opcode, namespace, range, transfer size.  kOk if the command
  // may be executed.
  u32 validate(const Sqe& sqe) const;

  // Applies attach() and detach(); called first by service() and reset().
  void take_changes() {
    if (has_changes_.load(std::memory_order_acquire)) apply_changes();  // pairs with announce()
  }
  // Posts a CQE; false if the completion queue is full.  Does nothing for a detached queue.
  bool post(u32 queue, u32 cid, u32 status) {
    return queues_[queue].sq == 0 || cq_post(&queues_[queue], cid, status);
  }
  u64 sleep_limit(u64 timeout_ns) const {
    return pollers_ > 0 && timeout_ns > kPollNs ? kPollNs : timeout_ns;
  }

  std::vector<ControllerQueue> queues_;  // a detached one leaves its place empty; never grows
  std::vector<u64> namespace_nlb_;

 private:
  static constexpr u64 kPollNs = 20'000;
  struct Change {
    ControllerQueue queue;
    bool is_removal;
  };
  void announce();
  void apply_changes();

  std::mutex changes_mutex_;
  std::condition_variable changed_;
  std::vector<Change> changes_;
  std::vector<u64> attached_;  // their `sq`, changes included
  std::atomic<bool> has_changes_{false};
  std::atomic<int> pollers_{0};
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> is_claimed_{false};
};

u64 monotonic_ns();  // CLOCK_MONOTONIC

}  // namespace gio

extern "C" {
// All calls take a handle made by a gio_*_controller_create; errors are negative errnos.
TUTTI_API int gio_controller_info(gio::Controller*, gio::ControllerInfo* out);
TUTTI_API uint64_t gio_controller_namespace_nlb(gio::Controller*, uint32_t nsid);
TUTTI_API int gio_controller_register(gio::Controller*, uint64_t address, uint64_t nbytes);
TUTTI_API int gio_controller_unregister(gio::Controller*, uint64_t address);
TUTTI_API int gio_controller_attach(gio::Controller*, const gio::QueuePair* qp);
TUTTI_API int gio_controller_detach(gio::Controller*, const gio::QueuePair* qp,
                                    uint64_t timeout_ns);
TUTTI_API void gio_controller_expect_rings(gio::Controller*, int change);
TUTTI_API uint32_t gio_controller_service(gio::Controller*, uint64_t timeout_ns);
TUTTI_API int gio_controller_start(gio::Controller*);
TUTTI_API void gio_controller_stop(gio::Controller*);
TUTTI_API int gio_controller_is_claimed(gio::Controller*);
// See Controller::reset; -EBUSY while it is claimed.
TUTTI_API int gio_controller_reset(gio::Controller*, uint64_t timeout_ns);
// Frees a controller, which must have been reset.
TUTTI_API void gio_controller_destroy(gio::Controller*);
}

// A drive that this process owns through vfio.  Submitters ring the drive itself and read its
// completions.  This class sleeps until the drive has answered, forwards shadow doorbells, and
// detects that a drive is lost.
//
// Registers, admin commands and the creation of queues after a reset are in Python
// (tutti/gio_uring/drives/admin.py), called through `restart`.
#pragma once

#include <poll.h>

#include <atomic>
#include <vector>

#include "controller.h"

namespace gio {

// Plain data, mirrored by tutti/gio_uring/controller_vfio.py.
struct VfioConfig {
  u64 namespace_nlb;     // u64[namespaces]
  u64 doorbells;         // offset in device_fd of the doorbell registers, BAR0 + 1000h
  u64 doorbells_nbytes;  // whole pages
  u64 shadow;            // shadow doorbells in the doorbells' layout, or 0
  u64 event_index;       // the drive's event indices next to them, or 0
  u64 restart;           // int (*)(u64 timeout_ns): 0, -EBUSY (ask again), or a negative errno
  u64 csts;              // offset of the controller's status register in device_fd
  u32 doorbell_nbytes;   // from one doorbell to the next
  u32 namespaces;
  u32 lba_shift;
  u32 mdts_nbytes;
  u32 sgl_descriptors;
  u32 flags;
  u32 depth_max;
  int device_fd;     // all five stay the caller's and outlive the controller
  int container_fd;  // whose mappings are this drive's alone
  int irq_fd;        // counts interrupts of completion queues; -1: there are none
  int request_fd;    // readable when the kernel wants the device back
  int wake_fd;       // an eventfd
};
static_assert(sizeof(VfioConfig) == 104, "layout shared with Python");

// Plain data, mirrored by tutti/gio_uring/drives/rescue.py.
struct LateCommand {
  u32 qid;
  u32 cid;
  u64 deadline_ns;  // CLOCK_MONOTONIC; tells commands of one CID apart
};
static_assert(sizeof(LateCommand) == 16, "layout shared with Python");

// Requests to the thread of service(), which owns the rings, by a reset in another thread.
enum Ask : u32 { kAskNothing, kAskEndAll, kAskGoOn, kAskLose };

class VfioController final : public Controller {
 public:
  explicit VfioController(const VfioConfig& config);
  ~VfioController() override;
  VfioController(const VfioController&) = delete;
  VfioController& operator=(const VfioController&) = delete;

  // Maps the doorbells: 0, or a negative errno.
  int map_doorbells();
  u64 doorbells() const { return doorbells_; }

  u32 service(u64 timeout_ns) override;
  void wake() override;

  // Calls `restart`.  A drive that cannot be restarted is lost: the IOMMU then blocks its access to
  // memory, which is what a reset must achieve.  -ETIMEDOUT if that fails, too.
  int reset(u64 timeout_ns) override;

  // As Controller::attach, for a queue pair of a CPU thread, before the controller is served; `qp`
  // has the drive's doorbells, or its shadow doorbells.  A GPU's queue pairs are not attached.
  int attach_pair(QueuePair* qp);

  // Ends every command without a completion with `status`, and resets all rings.  Only while the
  // drive is disabled, and while no submitter is between sq_enqueue and sq_ring.
  void end_all(u32 status);

  void late(const QueuePair& qp, u32 cid, u64 deadline_ns) override;
  void late_ended(const QueuePair& qp, u32 cid) override;

  // A reset concurrent with service(), by one other thread at a time: park(), disable the drive,
  // ask for kAskEndAll, enable it and make its queues, ask for kAskGoOn.  An ask is done when
  // asked() is 0.
  //
  // park: redirects doorbells to ordinary memory until kAskGoOn; 0, or a negative errno.
  int park();
  void ask(u32 what);
  u32 asked() const;
  // Writes up to `max` late commands; returns the number of all.
  u32 late_commands(LateCommand* out, u32 max);

  // Unmaps all memory and the doorbells; 0, or a negative errno.  Every command, in flight or
  // later, ends with kDeviceGone.
  int lose();

  bool is_gone() const { return is_gone_; }

  // For a thread that sleeps on several drives: the descriptors to poll, the limit of the sleep,
  // and the handling of the result.
  static constexpr u32 kPollFds = 2;
  void poll_on(pollfd* fds) const;
  u64 sleep_max(u64 timeout_ns) const;
  void woke(const pollfd* fds);

 private:
  void forward_shadows();
  u32 pending() const;
  u32 refuse(u64 timeout_ns);
  void sleep(u64 timeout_ns);
  void check_health();
  void end_commands(QueuePair* qp, u32 status);
  void answer_ask();
  int go_on();
  u64 doorbell_offset(size_t pair, u32 which) const {
    return (2 * pairs_[pair]->qid + which) * config_.doorbell_nbytes;
  }

  const VfioConfig config_;
  u64 doorbells_ = 0;  // address of the mapping
  std::vector<QueuePair*> pairs_;
  std::vector<u32> rung_;          // SQ tail and CQ head of each pair, as the drive knows them
  std::vector<u32> parked_words_;  // likewise, as they were rung while the doorbells were parked
  std::atomic<bool> is_gone_{false};
  std::atomic<bool> is_parked_{false};
  std::atomic<u32> asked_{kAskNothing};
  std::mutex late_mutex_;
  std::vector<LateCommand> late_;
  u64 next_look_ns_ = 0;
  u64 next_check_ns_ = 0;
};

}  // namespace gio

extern "C" {
// 0 and a controller that gio_controller_destroy frees; or a negative errno.
TUTTI_API int gio_vfio_controller_create(const gio::VfioConfig*, gio::Controller** out);
// The functions below take only such a controller.
TUTTI_API uint64_t gio_vfio_controller_doorbells(gio::Controller*);
TUTTI_API int gio_vfio_controller_attach(gio::Controller*, gio::QueuePair*);
TUTTI_API void gio_vfio_controller_end_all(gio::Controller*, uint32_t status);
TUTTI_API int gio_vfio_controller_lose(gio::Controller*);
TUTTI_API int gio_vfio_controller_park(gio::Controller*);
TUTTI_API void gio_vfio_controller_ask(gio::Controller*, uint32_t what);
TUTTI_API uint32_t gio_vfio_controller_asked(gio::Controller*);
TUTTI_API uint32_t gio_vfio_controller_late(gio::Controller*, gio::LateCommand* out, uint32_t max);
TUTTI_API int gio_vfio_controller_is_gone(gio::Controller*);
}

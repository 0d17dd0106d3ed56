// Several drives as the namespaces of one controller: commands go from the submitters' queues to
// the queue pair of the drive that has their namespace, under a CID of that drive's.  When one
// drive is lost, its commands end with kDeviceGone and the others go on.
#pragma once

#include <vector>

#include "controller_vfio.h"

namespace gio {

// Plain data, mirrored by tutti/gio_uring/controller_span.py.
struct SpanPlace {
  u32 drive;  // index of it
  u32 nsid;   // of the drive's own
};
static_assert(sizeof(SpanPlace) == 8, "layout shared with Python");

struct SpanConfig {
  u64 drives;  // VfioController*[n_drives]; they and the pairs outlive this controller
  u64 pairs;   // QueuePair*[n_drives], one of each drive, with no other submitter
  u64 places;  // SpanPlace[namespaces]
  u32 n_drives;
  u32 namespaces;
  u32 depth;    // of the pairs
  int wake_fd;  // an eventfd
};
static_assert(sizeof(SpanConfig) == 40, "layout shared with Python");

class SpanController final : public Controller {
 public:
  explicit SpanController(const SpanConfig& config);

  u32 service(u64 timeout_ns) override;
  void wake() override;
  int reset(u64 timeout_ns) override;
  void late(const QueuePair& qp, u32 cid, u64 deadline_ns) override;

 private:
  struct Origin {
    u32 queue;
    u32 cid;
  };
  struct Drive {
    VfioController* controller;
    QueuePair* pair;
    std::vector<Origin> origins;  // by CID
    std::vector<u32> active;      // CIDs under way
  };
  struct Answer {
    Origin origin;
    u32 status;
  };

  u32 turn();
  bool fetch(u32 queue);
  u32 send(u32 queue, const Sqe& sqe);
  u32 reap(Drive* drive);
  u32 answer(const Answer& answer);
  void sleep(u64 timeout_ns);

  std::vector<Drive> drives_;
  std::vector<SpanPlace> places_;
  std::vector<Answer> backlog_;  // of full completion queues
  std::vector<Answer> answering_;
  std::vector<pollfd> sleeping_;
  const int wake_fd_;
  const u32 depth_;
};

}  // namespace gio

extern "C" {
// 0 and a controller that gio_controller_destroy frees; -EINVAL, or -ENOMEM.
TUTTI_API int gio_span_controller_create(const gio::SpanConfig*, gio::Controller** out);
}

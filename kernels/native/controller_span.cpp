#include "controller_span.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "no_throw.h"

namespace gio {

SpanController::SpanController(const SpanConfig& config)
    : wake_fd_(config.wake_fd), depth_(config.depth) {
  const SpanPlace* places = at<SpanPlace>(config.places);
  places_.assign(places, places + config.namespaces);
  for (u32 i = 0; i < config.n_drives; ++i) {
    Drive drive;
    drive.controller = at<VfioController>(at<u64>(config.drives)[i]);
    drive.pair = at<QueuePair>(at<u64>(config.pairs)[i]);
    drive.origins.resize(drive.pair->depth);
    drives_.push_back(drive);
    drives_.back().active.reserve(drive.pair->depth);
  }
  // The thread that serves must not need memory.
  sleeping_.resize(drives_.size() * VfioController::kPollFds + 1);
  backlog_.reserve(config.depth * drives_.size());
  answering_.reserve(config.depth * drives_.size());
  info = drives_[0].controller->info;
  for (const Drive& drive : drives_) {
    const ControllerInfo& other = drive.controller->info;
    info.mdts_nbytes = std::min(info.mdts_nbytes, other.mdts_nbytes);
    info.sgl_descriptors = std::min(info.sgl_descriptors, other.sgl_descriptors);
    // A volatile cache of one is one of all; what only some can do, none can.
    info.flags = (info.flags & other.flags) | ((info.flags | other.flags) & kHasVolatileCache);
  }
  info.namespaces = config.namespaces;
  info.depth_max = config.depth;
  for (const SpanPlace& place : places_) {
    namespace_nlb_.push_back(drives_[place.drive].controller->namespace_nlb(place.nsid));
  }
}

u32 SpanController::service(u64 timeout_ns) {
  u32 posted = turn();
  if (posted != 0 || timeout_ns == 0) return posted;
  sleep(sleep_limit(timeout_ns));
  return turn();
}

void SpanController::wake() {
  const u64 one = 1;
  if (write(wake_fd_, &one, sizeof one) < 0) return;  // the counter is full: it is awake
}

int SpanController::reset(u64 timeout_ns) {
  take_changes();
  int result = 0;
  for (Drive& drive : drives_) {
    const int status = drive.controller->reset(timeout_ns);
    if (status != 0) result = status;
    reap(&drive);
  }
  for (u32 i = 0; i < queues_.size(); ++i) {
    Sqe sqe;
    for (u32 k = 0; k < depth_ && sq_fetch(&queues_[i], &sqe); ++k) {
      answer({{i, sqe_cid(sqe)}, kAbortedSqDeletion});
    }
  }
  return result;
}

// The drive that has the command is told; one that no drive has yet waits for a late one.
void SpanController::late(const QueuePair& qp, u32 cid, u64 deadline_ns) {
  for (const Drive& drive : drives_) {
    for (const u32 own : drive.active) {
      const Origin& origin = drive.origins[own];
      if (origin.cid != cid || queues_[origin.queue].sq != qp.sq) continue;
      drive.controller->late(*drive.pair, own, deadline_ns);
    }
  }
}

u32 SpanController::turn() {
  take_changes();
  u32 posted = 0;
  answering_.swap(backlog_);
  for (const Answer& late : answering_) posted += answer(late);
  answering_.clear();
  for (u32 i = 0; i < queues_.size(); ++i) {
    for (u32 k = 0; k < depth_ && backlog_.empty() && fetch(i); ++k) {
    }
  }
  for (Drive& drive : drives_) {
    sq_ring<MmioDoorbell>(drive.pair);
    drive.controller->service(0);
    posted += reap(&drive);
  }
  return posted;
}

// One command of a queue on its way; false when there is none, or no drive has room for one.
bool SpanController::fetch(u32 queue) {
  for (const Drive& drive : drives_) {
    if (drive.active.size() + 1 >= drive.pair->depth) return false;
  }
  Sqe sqe;
  if (!sq_fetch(&queues_[queue], &sqe)) return false;
  const u32 status = send(queue, sqe);
  if (status != kOk) answer({{queue, sqe_cid(sqe)}, status});
  return true;
}

u32 SpanController::send(u32 queue, const Sqe& sqe) {
  if (sqe.nsid == 0 || sqe.nsid > places_.size()) return kInvalidNamespace;
  const SpanPlace& place = places_[sqe.nsid - 1];
  Drive& drive = drives_[place.drive];
  const u32 cid = cid_acquire(drive.pair);
  if (cid == kNoCid) return kInternalError;  // fetch() saw that there is room
  drive.origins[cid] = {queue, sqe_cid(sqe)};
  drive.active.push_back(cid);
  Sqe own = sqe;
  own.cdw0 = (sqe.cdw0 & 0xffffu) | (cid << 16);
  own.nsid = place.nsid;
  sq_enqueue(drive.pair, own);
  return kOk;
}

u32 SpanController::reap(Drive* drive) {
  u32 found = 0;
  for (u32 n = 32; n == 32 && found < drive->pair->depth; found += n) {
    n = cq_reap<MmioDoorbell>(drive->pair, 32);
  }
  if (found == 0) return 0;
  u32 posted = 0;
  size_t kept = 0;
  for (const u32 cid : drive->active) {
    const u32 word = completion(drive->pair, cid);
    if (word == 0) {
      drive->active[kept++] = cid;
      continue;
    }
    const Origin origin = drive->origins[cid];
    cid_release(drive->pair, cid);
    posted += answer({origin, word & ~kCompleted});
  }
  drive->active.resize(kept);
  return posted;
}

u32 SpanController::answer(const Answer& answer) {
  if (post(answer.origin.queue, answer.origin.cid, answer.status)) return 1;
  backlog_.push_back(answer);
  return 0;
}

void SpanController::sleep(u64 timeout_ns) {
  std::vector<pollfd>& fds = sleeping_;
  fds[0] = {wake_fd_, POLLIN, 0};
  pollfd* next = &fds[1];
  for (const Drive& drive : drives_) {
    drive.controller->poll_on(next);
    if (drive.controller->is_gone()) next[0].fd = next[1].fd = -1;
    timeout_ns = drive.controller->sleep_max(timeout_ns);
    next += VfioController::kPollFds;
  }
  const timespec limit = {static_cast<time_t>(timeout_ns / 1'000'000'000u),
                          static_cast<long>(timeout_ns % 1'000'000'000u)};
  ppoll(fds.data(), fds.size(), &limit, nullptr);
  u64 count;
  if (fds[0].revents != 0 && read(wake_fd_, &count, sizeof count) < 0) return;
  next = &fds[1];
  for (const Drive& drive : drives_) {
    drive.controller->woke(next);
    next += VfioController::kPollFds;
  }
}

}  // namespace gio

int gio_span_controller_create(const gio::SpanConfig* config, gio::Controller** out) {
  if (config->n_drives == 0 || config->namespaces == 0 || config->namespaces > 256) return -EINVAL;
  for (gio::u32 i = 0; i < config->namespaces; ++i) {
    if (gio::at<gio::SpanPlace>(config->places)[i].drive >= config->n_drives) return -EINVAL;
  }
  return gio::without_exceptions([=] {
    *out = new gio::SpanController(*config);
    return 0;
  });
}

// What the thread build and the fiber build share: one queue pair, submitters that check every
// completion, a controller that checks every SQE.
//
// The harness adds no order of its own: its flags and counters are relaxed, so that a missing
// release or acquire in the protocol stays visible to TSan.  Payloads and results are plain memory
// for the same reason.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "fiber.h"  // first: defines GIO_SCHED_POINT
// The headers under test.
#include "gio_uring/controller_queue.h"
#include "gio_uring/queue_pair.h"

namespace ring {

using fiber::Random;
using gio::u32;
using gio::u64;

enum Fault : int {
  kNone = 0,
  kStalled = 1,        // commands are left, nothing moves
  kTornEntry = 2,      // the controller fetched an SQE that no submitter wrote in this form
  kCidTwice = 3,       // a CID was in flight twice
  kTooMany = 4,        // more than depth-1 commands
  kExecutedTwice = 5,  // the controller fetched the same command again
  kQueueFull = 6,      // the completion queue had no room
  kWrongStatus = 7,    // a completion carried another command's status
  kStaleResult = 8,    // a completion was seen before its data
  kStalePayload = 9,   // a command was seen before its data
};

// The protocol as it is, and broken versions of it that the harness must catch.
enum Variant : u32 {
  kFaithful = 0,
  kRelaxedDoorbell = 1,  // the doorbell orders nothing
  kFullDepth = 2,        // depth commands in flight instead of depth-1
  kEarlyRelease = 3,     // a CID is released before its completion was read
  kLateCqDoorbell = 4,   // completions are published before the CQ head doorbell
};

struct Case {
  u32 depth;
  u32 submitters;
  u32 commands;  // each submitter does 1 to this many
  u64 seed;
  Variant variant;
  u32 laps;  // the counters start this many pairs of laps before 2^32, 0 at zero
};

struct RelaxedDoorbell {
  static void ring(u32* doorbell, u32 value) {
    GIO_SCHED_POINT();
    __atomic_store_n(doorbell, value, __ATOMIC_RELAXED);  // pairs with nothing: that is the fault
  }
  static void ring_head(u32* doorbell, u32 value) { ring(doorbell, value); }
};

// Keeps the CQ doorbell back until flush_late_doorbells.
struct LateDoorbell {
  static std::vector<std::pair<u32*, u32>>& held() {
    static std::vector<std::pair<u32*, u32>> doorbells;
    return doorbells;
  }
  static void ring_head(u32* doorbell, u32 value) { held().emplace_back(doorbell, value); }
};

inline void flush_late_doorbells() {
  for (u32 i = 0; i < 8; ++i) GIO_SCHED_POINT();
  auto doorbells = std::move(LateDoorbell::held());
  LateDoorbell::held().clear();
  for (auto& [doorbell, value] : doorbells) gio::store_release(doorbell, value);
}

inline u64 mix(u64 a, u64 b) { return Random(a * 0x9e3779b97f4a7c15u + b).next(); }

template <typename T>
u64 address_of(std::vector<T>& v) {
  return reinterpret_cast<u64>(v.data());
}

// Memory of one queue pair, both halves.
struct Queue {
  std::vector<gio::Sqe> sq;
  std::vector<gio::Cqe> cq;
  std::vector<u32> marks, cid_free, completions;
  alignas(64) u32 sq_doorbell = 0;
  alignas(64) u32 cq_doorbell = 0;
  gio::QueuePair submitter = {};
  gio::ControllerQueue controller = {};

  Queue(u32 depth, u32 cids, u32 first)
      : sq(depth), cq(depth), marks(depth), cid_free((depth + 31) / 32), completions(depth) {
    for (u32 cid = 0; cid < cids; ++cid) cid_free[cid / 32] |= 1u << (cid % 32);
    const u64 sq_bell = reinterpret_cast<u64>(&sq_doorbell);
    const u64 cq_bell = reinterpret_cast<u64>(&cq_doorbell);
    submitter.sq = controller.sq = address_of(sq);
    submitter.cq = controller.cq = address_of(cq);
    submitter.sq_doorbell = controller.sq_doorbell = sq_bell;
    submitter.cq_doorbell = controller.cq_doorbell = cq_bell;
    submitter.marks = address_of(marks);
    submitter.cid_free = address_of(cid_free);
    submitter.completions = address_of(completions);
    submitter.depth = controller.depth = depth;
    submitter.qid = controller.qid = 1;
    submitter.ticket = submitter.tail = submitter.cq_head = first;
    controller.sq_head = controller.cq_tail = first;
  }
};

// One case: the queue, what every command carries, and what was found wrong.
class World {
 public:
  const Case c;
  Queue queue;

  explicit World(const Case& the_case)
      : c(the_case), queue(c.depth, limit(), 0u - 2 * c.depth * c.laps), owners_(c.depth) {
    for (u32 s = 0; s < c.submitters; ++s) {
      counts_.push_back(1 + static_cast<u32>(mix(c.seed, s) % c.commands));
      total_ += counts_.back();
      payloads_.emplace_back(counts_.back());
      results_.emplace_back(counts_.back());
    }
  }

  u32 count(u32 submitter) const { return counts_[submitter]; }
  u32 total() const { return total_; }
  u64& payload(u32 submitter, u32 seq) { return payloads_[submitter][seq]; }
  u64& result(u32 submitter, u32 seq) { return results_[submitter][seq]; }
  bool known(u32 submitter, u32 seq) const {
    return submitter < c.submitters && seq < counts_[submitter];
  }
  u64 secret(u32 submitter, u32 seq) const { return mix(c.seed ^ submitter, seq); }
  u32 status(u32 submitter, u32 seq) const {
    const u64 draw = secret(submitter, seq) >> 40;
    return draw % 4 == 0 ? static_cast<u32>(draw >> 2) & 0x7ffu : gio::kOk;
  }

  // Most commands that may be in flight.  The broken variant is let through: what it does to the
  // ring is to be caught, not that it does it.
  u32 limit() const { return c.variant == kFullDepth ? c.depth : c.depth - 1; }

  // The first fault is kept; all fibers stop at it.
  void report(Fault fault) {
    int none = kNone;
    fault_.compare_exchange_strong(none, fault, std::memory_order_relaxed);
  }
  int fault() const { return fault_.load(std::memory_order_relaxed); }

  void own(u32 cid, u32 submitter) {
    if (owners_[cid].exchange(submitter + 1, std::memory_order_relaxed) != 0) report(kCidTwice);
    if (in_flight_.fetch_add(1, std::memory_order_relaxed) + 1 > limit()) report(kTooMany);
  }
  void disown(u32 cid) {
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
    owners_[cid].store(0, std::memory_order_relaxed);
  }

 private:
  std::vector<u32> counts_;
  u32 total_ = 0;
  std::vector<std::vector<u64>> payloads_, results_;
  std::vector<std::atomic<u32>> owners_;
  std::atomic<u32> in_flight_{0};
  std::atomic<int> fault_{kNone};
};

// Every dword of a command follows from its submitter, number and CID, so that the other side can
// make it again: a torn or stale SQE differs.
inline gio::Sqe make_command(const World& world, u32 submitter, u32 seq, u32 cid) {
  Random random(world.secret(submitter, seq));
  gio::Sqe sqe = {};
  sqe.cdw0 = gio::make_cdw0(gio::kWrite, gio::kPsdtPrp, cid);
  sqe.nsid = submitter;
  sqe.cdw2 = seq;
  sqe.cdw3 = static_cast<u32>(random.next());
  sqe.mptr = random.next();
  sqe.dptr[0] = random.next();
  sqe.dptr[1] = random.next();
  const u64 more[] = {random.next(), random.next(), random.next()};
  std::memcpy(&sqe.cdw10, more, sizeof more);  // up to dword 15
  return sqe;
}

// The other side: fetches, checks, and completes in an order of its own.
class CheckingController {
 public:
  explicit CheckingController(World* world)
      : world_(*world), random_(world->c.seed + 1), in_flight_(world->c.depth) {}

  u32 completed() const { return completed_; }

  // One turn of work; false when there was nothing to do.
  bool step() {
    bool moved = false;
    const u32 burst = 1 + random_.below(world_.c.depth);
    gio::Sqe sqe;
    for (u32 i = 0; i < burst && sq_fetch(&world_.queue.controller, &sqe); ++i) {
      moved = true;
      accept(sqe);
    }
    const u32 finish = random_.below(static_cast<u32>(pending_.size()) + 1);
    for (u32 i = 0; i < finish + !moved && !pending_.empty(); ++i) {
      moved = true;
      complete(random_.below(static_cast<u32>(pending_.size())));
    }
    return moved;
  }

 private:
  void accept(const gio::Sqe& sqe) {
    const u32 cid = sqe_cid(sqe), submitter = sqe.nsid, seq = sqe.cdw2;
    if (cid >= world_.c.depth || !world_.known(submitter, seq)) return world_.report(kTornEntry);
    const gio::Sqe written = make_command(world_, submitter, seq, cid);
    if (std::memcmp(&sqe, &written, sizeof sqe) != 0) return world_.report(kTornEntry);
    if (in_flight_[cid]) return world_.report(kCidTwice);
    if (world_.result(submitter, seq) != 0) return world_.report(kExecutedTwice);
    if (world_.payload(submitter, seq) != world_.secret(submitter, seq)) {
      return world_.report(kStalePayload);
    }
    in_flight_[cid] = true;
    pending_.push_back(sqe);
    if (pending_.size() > world_.limit()) world_.report(kTooMany);
  }

  void complete(u32 at) {
    const gio::Sqe sqe = pending_[at];
    pending_[at] = pending_.back();
    pending_.pop_back();
    in_flight_[sqe_cid(sqe)] = false;
    world_.result(sqe.nsid, sqe.cdw2) = ~world_.secret(sqe.nsid, sqe.cdw2);
    const u32 status = world_.status(sqe.nsid, sqe.cdw2);
    if (!cq_post(&world_.queue.controller, sqe_cid(sqe), status)) world_.report(kQueueFull);
    ++completed_;
  }

  World& world_;
  Random random_;
  std::vector<gio::Sqe> pending_;
  std::vector<bool> in_flight_;
  u32 completed_ = 0;
};

// One submitter: batches of commands, one ring of the doorbell each, every completion checked.
template <typename Doorbell, typename CqDoorbell>
class Submitter {
 public:
  Submitter(World* world, u32 id)
      : world_(*world), qp_(&world->queue.submitter), id_(id), random_(mix(world->c.seed, ~id)) {}

  bool finished() const { return next_ == world_.count(id_) && mine_.empty(); }

  // One turn: submit what there are CIDs for, ring, reap, look.  False when nothing moved.
  bool step() {
    const u32 batch = 1 + random_.below(world_.c.depth);
    u32 sent = 0;
    while (sent < batch && next_ < world_.count(id_) && submit()) ++sent;
    if (sent != 0) gio::sq_ring<Doorbell>(qp_);
    gio::cq_reap<CqDoorbell>(qp_, 1 + random_.below(40));
    if (world_.c.variant == kLateCqDoorbell) flush_late_doorbells();
    bool moved = sent != 0;
    for (size_t i = 0; i < mine_.size();) {
      if (look(mine_[i])) {
        mine_[i] = mine_.back();
        mine_.pop_back();
        moved = true;
      } else {
        ++i;
      }
    }
    return moved;
  }

 private:
  struct Command {
    u32 cid, seq;
  };

  bool submit() {
    const u32 cid = cid_acquire(qp_);
    if (cid == gio::kNoCid) return false;
    world_.own(cid, id_);
    world_.payload(id_, next_) = world_.secret(id_, next_);
    sq_enqueue(qp_, make_command(world_, id_, next_, cid));
    mine_.push_back({cid, next_++});
    if (world_.c.variant == kEarlyRelease) release(cid);
    return true;
  }

  bool look(const Command& command) {
    const u32 word = completion(qp_, command.cid);
    if (word == 0) return false;
    if (word != (gio::kCompleted | world_.status(id_, command.seq))) world_.report(kWrongStatus);
    if (world_.result(id_, command.seq) != ~world_.secret(id_, command.seq)) {
      world_.report(kStaleResult);
    }
    if (world_.c.variant != kEarlyRelease) release(command.cid);
    return true;
  }

  void release(u32 cid) {
    world_.disown(cid);
    cid_release(qp_, cid);
  }

  World& world_;
  gio::QueuePair* qp_;
  u32 id_;
  Random random_;
  u32 next_ = 0;
  std::vector<Command> mine_;
};

}  // namespace ring

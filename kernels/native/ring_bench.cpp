// Measures the commands per second of one submitter on one queue pair.
#include <algorithm>
#include <cerrno>
#include <vector>

#include "controller.h"

namespace gio {

namespace {

constexpr u64 kSilenceNs = 10'000'000'000;  // without a completion
constexpr u32 kReapMax = 32;

struct Reads {
  u64 address;
  u64 nbytes;  // of the memory that is read into, in rotation
  u64 size_nlb;
  u32 nlb;
  u32 lba_shift;
};

Sqe read_command(const Reads& reads, u64 number, u32 cid) {
  const u64 transfer_nbytes = static_cast<u64>(reads.nlb) << reads.lba_shift;
  const u64 slba = number % (reads.size_nlb / reads.nlb) * reads.nlb;
  Sqe sqe = {};
  sqe.cdw0 = make_cdw0(kRead, kPsdtSgl, cid);
  sqe.nsid = 1;
  sqe.dptr[0] = reads.address + number % (reads.nbytes / transfer_nbytes) * transfer_nbytes;
  sqe.dptr[1] = transfer_nbytes;  // one data block
  sqe.cdw10 = static_cast<u32>(slba);
  sqe.cdw11 = static_cast<u32>(slba >> 32);
  sqe.cdw12 = reads.nlb - 1;
  return sqe;
}

// Commands in flight, oldest first: a ring of CIDs.
struct Flight {
  explicit Flight(u32 depth) : cids(depth), mask(depth - 1) {}
  u32 size() const { return static_cast<u32>(submitted - finished); }

  std::vector<u32> cids;
  u32 mask;
  u64 submitted = 0;
  u64 finished = 0;
};

u32 submit(QueuePair* qp, const Reads& reads, u64 commands, u32 batch, Flight* flight) {
  u32 n = 0;
  for (; n < batch && flight->submitted < commands; ++n) {
    const u32 cid = cid_acquire(qp);  // pairs with cid_release in finish
    if (cid == kNoCid) break;
    sq_enqueue(qp, read_command(reads, flight->submitted, cid));
    flight->cids[flight->submitted++ & flight->mask] = cid;
  }
  if (n != 0) sq_ring<WordDoorbell>(qp);
  return n;
}

// Releases the CIDs of the oldest commands that are complete.  Returns the first error.
u32 finish(QueuePair* qp, Flight* flight) {
  u32 error = kOk;
  while (flight->size() != 0) {  // bounded: each turn finishes one command
    const u32 cid = flight->cids[flight->finished & flight->mask];
    const u32 word = completion(qp, cid);
    if (word == 0) break;
    if (error == kOk) error = word & ~kCompleted;
    cid_release(qp, cid);  // pairs with cid_acquire in submit
    ++flight->finished;
  }
  return error;
}

// 0, -EIO if a command failed, -ETIMEDOUT if the controller stopped answering.
int read_all(QueuePair* qp, const Reads& reads, u64 commands, u32 batch) {
  Flight flight(qp->depth);
  u64 deadline_ns = monotonic_ns() + kSilenceNs;
  u32 idle = 0;
  while (flight.finished < commands) {  // bounded by deadline_ns
    const u32 room = qp->depth - 1 - flight.size();
    u32 done = 0;
    if (room >= std::min(batch, qp->depth - 1)) {
      done += submit(qp, reads, commands, batch, &flight);
    }
    done += cq_reap<WordDoorbell>(qp, kReapMax);
    if (finish(qp, &flight) != kOk) return -EIO;
    if (done != 0) {
      idle = 0;
      continue;
    }
    __builtin_ia32_pause();
    if (++idle % 4096 == 1) {
      const u64 now_ns = monotonic_ns();
      if (idle == 1) deadline_ns = now_ns + kSilenceNs;
      if (now_ns > deadline_ns) return -ETIMEDOUT;
    }
  }
  return 0;
}

// A load described by Python: commands to random LBAs, `depth` of them in flight, each one timed.
struct PathLoad {
  u64 commands;
  u64 address;
  u64 seed;
  u64 latencies_ns;  // u64[commands], in the order of completion
  u32 depth;
  u32 nlb;
  u32 opcode;
  u32 reserved;
};

struct Timed {
  u32 cid;
  u64 begin_ns;
};

u64 next_random(u64* state) {  // splitmix64 (Steele, Lea and Flood 2014)
  u64 z = *state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

bool submit_timed(QueuePair* qp, const PathLoad& load, const Controller& controller, u64* state,
                  u32 place, Timed* timed) {
  const u32 cid = cid_acquire(qp);  // pairs with cid_release in time_all
  if (cid == kNoCid) return false;
  const u64 places = controller.namespace_nlb(1) / load.nlb;
  const u64 nbytes = static_cast<u64>(load.nlb) << controller.info.lba_shift;
  Reads where = {load.address + place * nbytes, nbytes, controller.namespace_nlb(1), load.nlb,
                 controller.info.lba_shift};
  Sqe sqe = read_command(where, next_random(state) % places, cid);
  sqe.dptr[0] = where.address;
  sqe.cdw0 = make_cdw0(load.opcode, kPsdtSgl, cid);
  *timed = {cid, monotonic_ns()};
  sq_enqueue(qp, sqe);
  return true;
}

// As read_all, but every command has memory of its own, and commands end in any order.
int time_all(QueuePair* qp, const PathLoad& load, const Controller& controller) {
  std::vector<Timed> flight(load.depth, Timed{kNoCid, 0});
  u64* latencies = reinterpret_cast<u64*>(load.latencies_ns);
  u64 submitted = 0, finished = 0, state = load.seed;
  u64 deadline_ns = monotonic_ns() + kSilenceNs;
  while (finished < load.commands) {  // bounded by deadline_ns
    u32 rung = 0;
    for (u32 i = 0; i < load.depth && submitted < load.commands; ++i) {
      if (flight[i].cid != kNoCid) continue;
      if (!submit_timed(qp, load, controller, &state, i, &flight[i])) break;
      ++submitted, ++rung;
    }
    if (rung != 0) sq_ring<WordDoorbell>(qp);
    const u32 reaped = cq_reap<WordDoorbell>(qp, kReapMax);
    const u64 now_ns = monotonic_ns();
    if (reaped == 0) {
      if (now_ns > deadline_ns) return -ETIMEDOUT;
      __builtin_ia32_pause();
      continue;
    }
    deadline_ns = now_ns + kSilenceNs;
    for (Timed& timed : flight) {
      const u32 word = timed.cid == kNoCid ? 0 : completion(qp, timed.cid);
      if (word == 0) continue;
      if ((word & ~kCompleted) != kOk) return -EIO;
      cid_release(qp, timed.cid);  // pairs with cid_acquire in submit_timed
      latencies[finished++] = now_ns - timed.begin_ns;
      timed.cid = kNoCid;
    }
  }
  return 0;
}

}  // namespace

}  // namespace gio

// Times random commands to namespace 1; `load` is a gio::PathLoad, whose memory at `address` has
// room for `depth` transfers. The caller's thread submits and spins, a thread of the controller
// executes. After -ETIMEDOUT commands are still outstanding: reset the controller.
TUTTI_API int gio_path_bench(gio::Controller* controller, gio::QueuePair* qp, const void* load,
                             double* seconds) {
  const gio::PathLoad& path = *static_cast<const gio::PathLoad*>(load);
  if (path.nlb == 0 || path.nlb > gio::kNlbMax || path.nlb > controller->namespace_nlb(1) ||
      path.depth == 0 || path.depth >= qp->depth) {
    return -EINVAL;
  }
  int status = controller->start();
  if (status != 0) return status;
  const gio::u64 begin_ns = gio::monotonic_ns();
  status = gio::time_all(qp, path, *controller);
  *seconds = static_cast<double>(gio::monotonic_ns() - begin_ns) * 1e-9;
  controller->stop();
  return status;
}

// Reads `commands` times `nlb` blocks of namespace 1 into the registered memory at `address`, with
// one doorbell per `batch`; the caller's thread submits, a thread of the controller executes.
// After -ETIMEDOUT commands are still outstanding: reset the controller.
TUTTI_API int gio_ring_bench(gio::Controller* controller, gio::QueuePair* qp, uint64_t commands,
                             uint32_t batch, uint64_t address, uint64_t nbytes, uint32_t nlb,
                             double* seconds) {
  const gio::Reads reads = {address, nbytes, controller->namespace_nlb(1), nlb,
                            controller->info.lba_shift};
  const gio::u64 transfer_nbytes = static_cast<gio::u64>(nlb) << reads.lba_shift;
  if (batch == 0 || nlb == 0 || nlb > gio::kNlbMax || nlb > reads.size_nlb) return -EINVAL;
  if (transfer_nbytes > nbytes) return -EINVAL;
  int status = controller->start();
  if (status != 0) return status;
  const gio::u64 begin_ns = gio::monotonic_ns();
  status = gio::read_all(qp, reads, commands, batch);
  *seconds = static_cast<double>(gio::monotonic_ns() - begin_ns) * 1e-9;
  controller->stop();
  return status;
}

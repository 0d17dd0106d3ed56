// One warp per job: lanes build SQEs of an IOCB's runs, lane 0 rings, all look for completions.
//
// The same text is compiled by NVRTC for the GPU and by g++ over simt.h; it is how a kernel is
// meant to use the rings, and what the warp tests run.
#pragma once

#include "gio_uring/iocb.h"
#include "gio_uring/queue_pair.h"

namespace gio {

struct WarpJob {
  u64 qp;         // QueuePair
  u64 iocb;       // Iocb
  u64 statuses;   // u32[n_runs], written before the kernel ends
  u64 lists;      // list_nbytes of list memory for each CID
  u64 lists_dma;  // the same memory as the controller addresses it
  u64 timeout_ns;
  u32 list_nbytes;
  u32 layer;
  u32 first_run;  // runs first_run to first_run + n_runs - 1 of the IOCB
  u32 n_runs;
};

constexpr u32 kAllLanes = 0xffffffffu;

GIO_HD u64 now_ns() {
#if GIO_DEVICE
  u64 now;
  // Pairs with nothing: volatile keeps the clock from being read once.
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return simt::now_ns();
#endif
}

// Builds and enqueues one run's command.  True when it is in flight under *cid; otherwise *cid is
// kNoCid, and *status says whether the run is refused (not kOk) or has to wait for a CID.
GIO_HD bool lane_submit(const WarpJob& job, u32 run, u32* cid, u32* status) {
  QueuePair* qp = at<QueuePair>(job.qp);
  const Iocb& io = *at<Iocb>(job.iocb);
  *status = kOk;
  *cid = cid_acquire(qp);
  if (*cid == kNoCid) return false;
  const u64 offset = static_cast<u64>(*cid) * job.list_nbytes;
  const ListMemory list = {job.lists + offset, job.lists_dma + offset, job.list_nbytes};
  Sqe sqe;
  *status = iocb_build(io, at<Run>(io.runs)[job.first_run + run], job.layer, *cid, list, &sqe);
  if (*status != kOk) {
    cid_release(qp, *cid);
    *cid = kNoCid;
    return false;
  }
  sq_enqueue(qp, sqe);
  return true;
}

// One run on each lane, until all are completed or the deadline passed.  A command that is still
// in flight then keeps its CID and its list memory: the controller may yet write.
template <typename Doorbell>
GIO_HD void warp_submit(const WarpJob& job, u32 run, u64 deadline) {
  QueuePair* qp = at<QueuePair>(job.qp);
  const bool active = run < job.n_runs;
  bool done = !active;
  u32 cid = kNoCid;
  u32 status = kTimedOut;
  u32 expired = 0;
  while (__ballot_sync(kAllLanes, !done) != 0 && expired == 0) {  // bounded by the deadline
    bool sent = false;
    if (!done && cid == kNoCid) {
      u32 refused;
      sent = lane_submit(job, run, &cid, &refused);
      if (refused != kOk) {
        status = refused;
        done = true;
      }
    }
    const u32 senders = __ballot_sync(kAllLanes, sent);
    if (threadIdx.x == 0) {
      if (senders != 0) sq_ring<Doorbell>(qp);
      cq_reap<Doorbell>(qp, 32);
    }
    __syncwarp();
    const u32 word = cid == kNoCid ? 0 : completion(qp, cid);
    if (word != 0) {
      status = word & ~kCompleted;
      cid_release(qp, cid);
      cid = kNoCid;
      done = true;
    } else {
      __nanosleep(64);
    }
    expired = __shfl_sync(kAllLanes, static_cast<u32>(now_ns() > deadline), 0);
  }
  if (active) at<u32>(job.statuses)[run] = status;
}

template <typename Doorbell>
GIO_HD void warp_run(const WarpJob* jobs) {
  const WarpJob& job = jobs[blockIdx.x];
  const u64 deadline = now_ns() + job.timeout_ns;
  for (u32 base = 0; base < job.n_runs; base += blockDim.x) {
    warp_submit<Doorbell>(job, base + threadIdx.x, deadline);
  }
}

}  // namespace gio

// Launched with 32 threads a block, a block for each job.
extern "C" __global__ void __launch_bounds__(32) gio_warp_word(const gio::WarpJob* jobs) {
  gio::warp_run<gio::WordDoorbell>(jobs);
}
extern "C" __global__ void __launch_bounds__(32) gio_warp_mmio(const gio::WarpJob* jobs) {
  gio::warp_run<gio::MmioDoorbell>(jobs);
}

// A warp that rings, or reaps, and another submitter that comes between two of its accesses, one
// case a line:
//
//   DEPTH VERB SEED POINT  ->  CAME GOOD
//
// VERB 0: the warp sends a command a lane and rings; the other sends one and rings.  1: both reap.
// The other comes at switch point POINT of the warp, counted from its call.  CAME: there were so
// many.  GOOD: everything finished was rung, or every completion was published once.
#include <cstdio>
#include <functional>

#include "simt.h"  // first: words of CUDA
// The other submitter's visit is one step: nothing is switched during it.
namespace visit {
long countdown = -1;
bool came = false;
bool is_inside = false;
std::function<void()> visitor;
inline void switch_point() {
  if (is_inside) return;
  if (countdown >= 0 && countdown-- == 0) {
    is_inside = true;
    visitor();
    is_inside = false;
  }
  fiber::switch_point();
}
}  // namespace visit
#undef GIO_SCHED_POINT
#define GIO_SCHED_POINT() ::visit::switch_point()
// The code under test, and a queue.
#include "ring_harness.h"
#include "submit.cuh"

namespace {

using gio::u32;
using Bell = gio::WordDoorbell;

struct Case {
  u32 depth, verb, seed;
  long point;
};

void send(gio::QueuePair* qp) {
  gio::Sqe sqe = {};
  sqe.cdw0 = gio::make_cdw0(gio::kFlush, gio::kPsdtPrp, cid_acquire(qp));
  sq_enqueue(qp, sqe);
}

// The controller fetches everything and completes `n` of it.
void serve(ring::Queue* queue, u32 n) {
  gio::Sqe sqe;
  for (u32 i = 0; i < n && sq_fetch(&queue->controller, &sqe); ++i) {
    cq_post(&queue->controller, sqe_cid(sqe), gio::kOk);
  }
}

// Runs a warp, each lane of which calls `body`; the visitor's clock starts where the lanes meet.
void run_warp(const Case& c, const std::function<void(u32)>& before,
              const std::function<void()>& body) {
  fiber::Scheduler scheduler(c.seed);
  simt::Launch launch;
  launch.spawn(&scheduler, 1, 1, [&] {
    before(gio::lane_index());
    __syncwarp();
    if (gio::lane_index() == 0) visit::countdown = c.point;
    __syncwarp();
    body();
  });
  scheduler.run(1u << 30);
  visit::came = visit::countdown < 0;
  visit::countdown = -1;
}

bool rings(const Case& c, ring::Queue* queue) {
  gio::QueuePair* qp = &queue->submitter;
  visit::visitor = [=] {
    send(qp);
    gio::sq_ring<Bell>(qp);
  };
  const auto one = [=](u32 lane) {
    if (lane < qp->depth - 2) send(qp);
  };
  run_warp(c, one, [=] { gio::warp_ring<Bell>(qp); });
  return qp->tail == qp->ticket && queue->sq_doorbell == (qp->tail & (qp->depth - 1));
}

bool reaps(const Case& c, ring::Queue* queue) {
  gio::QueuePair* qp = &queue->submitter;
  const u32 n = c.depth - 1;
  for (u32 i = 0; i < n; ++i) send(qp);
  gio::sq_ring<Bell>(qp);
  serve(queue, n / 2);
  std::vector<u32> taken(c.depth);
  visit::visitor = [&] {
    gio::cq_reap<Bell>(qp, 32);
    for (u32 cid = 0; cid < n; ++cid) {
      if (completion(qp, cid) == 0) continue;
      ++taken[cid];
      queue->completions[cid] = 0;  // as its next owner does
    }
    serve(queue, n);
  };
  run_warp(c, [](u32) {}, [=] { gio::warp_reap<Bell>(qp); });
  serve(queue, n);
  for (u32 i = 0; i < c.depth; ++i) gio::cq_reap<Bell>(qp, 32);
  bool good = qp->cq_head == n && queue->cq_doorbell == (n & (c.depth - 1));
  for (u32 cid = 0; cid < n; ++cid) good = good && taken[cid] + (completion(qp, cid) != 0) == 1;
  return good;
}

void run(const Case& c) {
  ring::Queue queue(c.depth, c.depth - 1, 0);
  const bool good = c.verb == 0 ? rings(c, &queue) : reaps(c, &queue);
  const bool is_unlocked = queue.submitter.tail_lock == 0 && queue.submitter.cq_lock == 0;
  std::printf("%d %d\n", visit::came, good && is_unlocked);
  std::fflush(stdout);
}

}  // namespace

int main() {
  Case c;
  while (std::scanf("%u %u %u %ld", &c.depth, &c.verb, &c.seed, &c.point) == 4) {  // input's end
    run(c);
  }
  return 0;
}

// One schedule, played without threads: submitter A rings; each time it holds the lock, submitter B
// completes its command, submits the next one and fails to get the lock.  When both have returned
// from sq_ring, every finished SQE must have been rung, however often B came.
//
//   ring_handover DEPTH COMMANDS  ->  TICKETS RUNG
#include <cstdio>
#include <cstdlib>

#include "ring_harness.h"

namespace {

using ring::u32;

struct Story {
  ring::Queue queue;
  u32 left;
  u32 in_flight = gio::kNoCid;

  Story(u32 depth, u32 commands) : queue(depth, depth - 1, 0), left(commands) {}
};
Story* story = nullptr;

gio::Sqe command(u32 cid) {
  gio::Sqe sqe = {};
  sqe.cdw0 = gio::make_cdw0(gio::kFlush, gio::kPsdtPrp, cid);
  return sqe;
}

void submit_as_b();

// Stands for B's thread running between A's doorbell store and A's unlock.
struct InterruptedDoorbell {
  static void ring(u32* doorbell, u32 value) {
    gio::WordDoorbell::ring(doorbell, value);
    submit_as_b();
  }
  static void ring_head(u32* doorbell, u32 value) { gio::WordDoorbell::ring_head(doorbell, value); }
};

void submit_as_b() {
  gio::QueuePair* qp = &story->queue.submitter;
  gio::Sqe sqe;
  for (u32 i = 0; i < qp->depth && sq_fetch(&story->queue.controller, &sqe); ++i) {
    cq_post(&story->queue.controller, sqe_cid(sqe), gio::kOk);
  }
  gio::cq_reap<gio::WordDoorbell>(qp, 32);
  if (story->in_flight != gio::kNoCid) {
    if (completion(qp, story->in_flight) == 0) return;
    cid_release(qp, story->in_flight);
    story->in_flight = gio::kNoCid;
  }
  if (story->left == 0) return;
  --story->left;
  story->in_flight = cid_acquire(qp);
  sq_enqueue(qp, command(story->in_flight));
  gio::sq_ring<InterruptedDoorbell>(qp);  // returns at once: A holds the lock
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  Story the_story(static_cast<u32>(std::atoi(argv[1])), static_cast<u32>(std::atoi(argv[2])));
  story = &the_story;
  gio::QueuePair* qp = &the_story.queue.submitter;
  sq_enqueue(qp, command(cid_acquire(qp)));
  gio::sq_ring<InterruptedDoorbell>(qp);
  std::printf("%u %u\n", qp->ticket, qp->tail);
  return 0;
}

// The controller's half of a queue pair, for software controllers.  Everything that it reads from
// the submitter (tail, SQEs, CQ head) is validated.
#pragma once

#include "gio_uring/nvme_spec.h"

namespace gio {

struct ControllerQueue {
  u64 sq;           // Sqe[depth]
  u64 cq;           // Cqe[depth]
  u64 sq_doorbell;  // u32, written by the submitter
  u64 cq_doorbell;  // u32, written by the submitter
  u32 depth;
  u32 qid;
  u32 sq_head;  // monotonic: SQEs fetched
  u32 sq_tail;  // last doorbell value seen, 0..depth-1
  u32 cq_tail;  // monotonic: CQEs posted
  u32 cq_head;  // last doorbell value seen, 0..depth-1
};
static_assert(sizeof(ControllerQueue) == 56, "layout shared with Python");

// Takes the next SQE; false if there is none.  A tail outside the queue is ignored: the
// specification's "Invalid Doorbell Write Value" has no effect.
GIO_HD bool sq_fetch(ControllerQueue* q, Sqe* out) {
  const u32 head = q->sq_head & (q->depth - 1);
  if (head == q->sq_tail) {
    // Pairs with WordDoorbell::ring of the submission queue.
    const u32 tail = load_acquire(at<u32>(q->sq_doorbell));
    if (tail < q->depth) q->sq_tail = tail;
    if (head == q->sq_tail) return false;
  }
  *out = at<Sqe>(q->sq)[head];
  ++q->sq_head;
  return true;
}

// Posts a CQE.  False when the completion queue is full: try again after the submitter reaped.
GIO_HD bool cq_post(ControllerQueue* q, u32 cid, u32 status) {
  const u32 slot = q->cq_tail & (q->depth - 1);
  if (((slot + 1) & (q->depth - 1)) == q->cq_head) {
    // Pairs with WordDoorbell::ring of the completion queue.
    const u32 head = load_acquire(at<u32>(q->cq_doorbell));
    if (head < q->depth) q->cq_head = head;
    if (((slot + 1) & (q->depth - 1)) == q->cq_head) return false;
  }
  Cqe* cqe = &at<Cqe>(q->cq)[slot];
  const u32 phase = ((q->cq_tail / q->depth) & 1u) ^ 1u;
  cqe->result = 0;
  cqe->reserved = 0;
  cqe->sq = (q->sq_head & (q->depth - 1)) | (q->qid << 16);
  // Pairs with load_acquire in cq_reap: data and the other dwords come first.
  store_release(&cqe->status, make_cqe_status(cid, phase, status));
  ++q->cq_tail;
  return true;
}

}  // namespace gio

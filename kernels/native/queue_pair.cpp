// The operations of both halves of a queue pair as functions of the library: for submitters in
// Python, and for tests that replay a trace with these and with a model.
#include "gio_uring/queue_pair.h"
#include "api.h"
#include "gio_uring/controller_queue.h"

using gio::ControllerQueue;
using gio::QueuePair;
using gio::WordDoorbell;

TUTTI_API uint32_t gio_qp_cid_acquire(QueuePair* qp) {  // pairs with gio_qp_cid_release
  return gio::cid_acquire(qp);
}

TUTTI_API void gio_qp_cid_release(QueuePair* qp, uint32_t cid) {  // pairs with gio_qp_cid_acquire
  if (cid < qp->depth) gio::cid_release(qp, cid);
}

TUTTI_API void gio_qp_sq_enqueue(QueuePair* qp, const gio::Sqe* sqe) { gio::sq_enqueue(qp, *sqe); }

TUTTI_API void gio_qp_sq_ring(QueuePair* qp) { gio::sq_ring<WordDoorbell>(qp); }

TUTTI_API uint32_t gio_qp_cq_reap(QueuePair* qp, uint32_t max) {
  return gio::cq_reap<WordDoorbell>(qp, max);
}

// 0 = pending, else kCompleted | status; a CID outside the queue stays pending.
TUTTI_API uint32_t gio_qp_completion(const QueuePair* qp, uint32_t cid) {
  return cid < qp->depth ? gio::completion(qp, cid) : 0;
}

// 1 when an SQE was fetched, 0 when there is none.
TUTTI_API int gio_queue_sq_fetch(ControllerQueue* queue, gio::Sqe* out) {
  return gio::sq_fetch(queue, out) ? 1 : 0;
}

// 1 when a CQE was posted, 0 when the completion queue is full.
TUTTI_API int gio_queue_cq_post(ControllerQueue* queue, uint32_t cid, uint32_t status) {
  return gio::cq_post(queue, cid, status) ? 1 : 0;
}

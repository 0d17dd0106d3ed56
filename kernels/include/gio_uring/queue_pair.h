// The submitter's half of an NVMe queue pair: plain data that any number of threads, warps or
// fibers of one processor may share.
//
// Invariants (tests drive them at depths 2 to 64 with 1 to 8 submitters):
//  * A command exists from cid_acquire to cid_release; at most depth-1 exist.  Because SQEs are
//    fetched in order, the slot of a ticket is then always free, and a full queue is reported as
//    kNoCid, without a wait.
//  * SQ entries may be finished out of order; the doorbell only covers finished ones.
//  * A CQE is consumed, the CQ head doorbell written, and only then is the completion
//    published to the CID's owner: so a CID is never reused before its CQE slot is free.
// The depth is a power of two so that the monotonic 32-bit counters may wrap.
#pragma once

#include "gio_uring/nvme_spec.h"

namespace gio {

struct QueuePair {
  // Constant after creation.
  u64 sq;           // Sqe[depth], shared with the controller
  u64 cq;           // Cqe[depth], shared with the controller
  u64 sq_doorbell;  // u32 SQ tail
  u64 cq_doorbell;  // u32 CQ head
  u64 marks;        // u32[depth]: lap number of the SQE that is finished in this slot
  u64 cid_free;     // u32[(depth+31)/32]: bit set = CID free; bit depth-1 never set
  u64 completions;  // u32[depth] by CID: 0 = pending, else kCompleted | status
  u32 depth;
  u32 qid;
  // Words of the submitting side.
  alignas(64) u32 ticket;  // next SQ slot to hand out, monotonic
  u32 tail;                // SQ tail that was rung, monotonic; owned by the holder of tail_lock
  u32 tail_lock;
  // Words of the reaping side.
  alignas(64) u32 cq_head;  // monotonic; owned by the holder of cq_lock
  u32 cq_lock;
  u32 cid_hint;
  u32 reserved[13];
};
static_assert(sizeof(QueuePair) == 192, "layout shared with Python");

constexpr u32 kCompleted = 1u << 31;
constexpr u32 kNoCid = 0xffffffffu;

// Takes a free CID; kNoCid when depth-1 commands are in flight.  Tries bit `start` (below 32) and
// those above it first: lanes with different starts rarely collide.
GIO_HD u32 cid_acquire(QueuePair* qp, u32 start = 0) {
  const u32 words = (qp->depth + 31) / 32;
  u32* free_bits = at<u32>(qp->cid_free);
  const u32 first = own_load(&qp->cid_hint) % words;
  for (u32 i = 0; i < words; ++i) {
    const u32 w = (first + i) % words;
    u32 bits = own_load(&free_bits[w]);
    while (bits != 0) {  // bounded: each turn drops one bit
      const u32 above = bits & (0xffffffffu << start);
      const u32 bit = above != 0 ? above & (0u - above) : bits & (0u - bits);
      if (fetch_and(&free_bits[w], ~bit) & bit) {  // pairs with fetch_or in cid_release
        const u32 cid = w * 32 + lowest_bit(bit);
        own_store(&at<u32>(qp->completions)[cid], 0);
        own_store(&qp->cid_hint, w);
        return cid;
      }
      bits &= ~bit;
    }
  }
  return kNoCid;
}

// Releases a CID.  Only after its completion was read.
GIO_HD void cid_release(QueuePair* qp, u32 cid) {
  // Pairs with fetch_and in cid_acquire: the next owner sees the command's memory as free.
  fetch_or(&at<u32>(qp->cid_free)[cid / 32], 1u << (cid % 32));
}

// Copies a complete SQE (cdw0 holds a CID from cid_acquire) into the next slot.  The controller
// does not see it before sq_ring.
GIO_HD void sq_enqueue(QueuePair* qp, const Sqe& sqe) {
  // Pairs with the other submitters' fetch_add: they hold CIDs of all earlier tickets, so the
  // release of one of the last depth CIDs, and with it the fetch of this slot, came before.
  const u32 ticket = fetch_add(&qp->ticket, 1);
  const u32 slot = ticket & (qp->depth - 1);
  at<Sqe>(qp->sq)[slot] = sqe;
  // Pairs with own_load_acquire in sq_ring: who advances the tail over this slot sees the SQE.
  own_store_release(&at<u32>(qp->marks)[slot], ticket / qp->depth + 1);
}

GIO_HD bool sq_marked(const QueuePair* qp, u32 ticket) {
  // Pairs with own_store_release in sq_enqueue.
  return own_load_acquire(&at<u32>(qp->marks)[ticket & (qp->depth - 1)]) == ticket / qp->depth + 1;
}

// Publishes every finished SQE and rings the doorbell once.  Never waits: if another submitter has
// the lock, that one checks again after unlocking and publishes this one's entries, too.
template <typename Doorbell>
GIO_HD void sq_ring(QueuePair* qp) {
  u32 tail;
  do {  // bounded by the SQEs that other submitters finish meanwhile
    // Pairs with the exchange that unlocks: the winner sees the former holder's tail.
    if (exchange(&qp->tail_lock, 1) != 0) return;
    tail = own_load(&qp->tail);
    const u32 before = tail;
    while (tail - before < qp->depth && sq_marked(qp, tail)) ++tail;
    if (tail != before) {
      own_store(&qp->tail, tail);
      Doorbell::ring(at<u32>(qp->sq_doorbell), tail & (qp->depth - 1));
    }
    // Pairs with the exchange that locks.  The unlock comes before the last look at the marks,
    // a submitter's mark before its try of the lock: one of the two sees the other.
    exchange(&qp->tail_lock, 0);
  } while (sq_marked(qp, tail));
}

// Whether the controller has posted the CQE at a monotonic position; *dw3: its last dword.
GIO_HD bool cqe_posted(const QueuePair* qp, u32 position, u32* dw3) {
  const u32 phase = ((position / qp->depth) & 1u) ^ 1u;  // the first lap expects P = 1
  // Pairs with the controller's release of the CQE's last dword.
  *dw3 = load_acquire(&at<Cqe>(qp->cq)[position & (qp->depth - 1)].status);
  return cqe_phase(*dw3) == phase;
}

// Publishes a CQE's status to the command's owner.  A CID outside the queue is ignored.
GIO_HD void cqe_publish(QueuePair* qp, u32 dw3) {
  const u32 cid = cqe_cid(dw3);
  // Pairs with own_load_acquire in completion.
  if (cid < qp->depth)
    own_store_release(&at<u32>(qp->completions)[cid], kCompleted | cqe_status(dw3));
}

// Consumes up to `max` CQEs (at most 32 per call) and publishes their statuses to
// completions[cid].  Returns their number; 0 at once if another submitter is reaping.
template <typename Doorbell>
GIO_HD u32 cq_reap(QueuePair* qp, u32 max) {
  // Pairs with the exchange that unlocks: the winner sees the former holder's cq_head.
  if (exchange(&qp->cq_lock, 1) != 0) return 0;
  u32 entries[32];
  u32 n = 0;
  const u32 head = own_load(&qp->cq_head);
  while (n < max && n < 32 && cqe_posted(qp, head + n, &entries[n])) ++n;
  if (n != 0) {
    own_store(&qp->cq_head, head + n);
    Doorbell::ring_head(at<u32>(qp->cq_doorbell), (head + n) & (qp->depth - 1));
    for (u32 i = 0; i < n; ++i) cqe_publish(qp, entries[i]);
  }
  exchange(&qp->cq_lock, 0);  // pairs with the exchange that locks
  return n;
}

// State of a command, for its owner: 0 = pending, else kCompleted | status.
GIO_HD u32 completion(const QueuePair* qp, u32 cid) {
  // Pairs with own_store_release in cqe_publish.
  return own_load_acquire(&at<u32>(qp->completions)[cid]);
}

}  // namespace gio

// One warp drives one share of a layer through its queue: lanes compute the commands, lane 0 rings
// once for the warp, and 32 completions are polled together.
//
// The state of each run is in memory (RunState), so a kernel may end in the middle and the next one
// continues.  Lane i of the warp always handles the runs i, i + 32, ... of its share.
#pragma once

#include "block.cuh"
#include "parameters.cuh"

namespace gio {

// Number of consecutive lanes, from lane 0 on, for which is_yes is true.
GIO_HD u32 lanes_in_row(bool is_yes) {
  const u32 missing = ~__ballot_sync(kAllLanes, is_yes);
  return missing == 0 ? kLanes : lowest_bit(missing);
}

// sq_ring of queue_pair.h by a whole warp: the lanes check one mark each, at the same time.  The
// lanes' own marks were released, and the warp was synchronized since.
template <typename Doorbell>
GIO_HD void warp_ring(QueuePair* qp) {
  const u32 lane = lane_index();
  u32 n = 1;
  while (n != 0) {  // bounded by the SQEs that other submitters finish meanwhile
    u32 locked = 0, tail = 0;
    if (lane == 0) {
      // Pairs with the exchange that unlocks: the winner sees the former holder's tail.
      locked = exchange(&qp->tail_lock, 1) == 0;
      tail = own_load(&qp->tail);
    }
    if (__shfl_sync(kAllLanes, locked, 0) == 0) return;
    tail = __shfl_sync(kAllLanes, tail, 0);
    n = lanes_in_row(lane < qp->depth && sq_marked(qp, tail + lane));
    __syncwarp();  // the doorbell's release covers what all lanes have acquired
    if (lane == 0) {
      if (n != 0) {
        own_store(&qp->tail, tail + n);
        Doorbell::ring(at<u32>(qp->sq_doorbell), (tail + n) & (qp->depth - 1));
      }
      // Pairs with the exchange that locks.  As in sq_ring the unlock comes before the last look.
      exchange(&qp->tail_lock, 0);
    }
    __syncwarp();
    n = lanes_in_row(lane == 0 && sq_marked(qp, tail + n));
  }
}

// cq_reap of queue_pair.h by a whole warp: one CQE per lane, so a burst costs one round trip.  It
// reads the CQEs before it locks: an empty poll costs that round trip, but no fence.
template <typename Doorbell>
GIO_HD u32 warp_reap(QueuePair* qp) {
  const u32 lane = lane_index();
  const u32 head = __shfl_sync(kAllLanes, own_load(&qp->cq_head), 0);
  u32 dw3 = 0;
  // At most depth entries: the phase bit has the opposite meaning in the next lap.
  const u32 n = lanes_in_row(lane < qp->depth && cqe_posted(qp, head + lane, &dw3));
  if (n == 0) return 0;
  u32 locked = 0;
  if (lane == 0) {
    // Pairs with the exchange that unlocks: the winner sees the former holder's cq_head.
    locked = exchange(&qp->cq_lock, 1) == 0;
    // While the head is unchanged, the entries that were read are not consumed.
    const bool is_ours = locked != 0 && own_load(&qp->cq_head) == head;
    if (is_ours) {
      own_store(&qp->cq_head, head + n);
      Doorbell::ring_head(at<u32>(qp->cq_doorbell), (head + n) & (qp->depth - 1));
    } else if (locked != 0) {
      exchange(&qp->cq_lock, 0);  // pairs with the exchange that locks
    }
    locked = is_ours;
  }
  if (__shfl_sync(kAllLanes, locked, 0) == 0) return 0;
  __syncwarp();  // the doorbell precedes the publication
  if (lane < n) cqe_publish(qp, dw3);
  __syncwarp();
  if (lane == 0) exchange(&qp->cq_lock, 0);  // pairs with the exchange that locks
  return n;
}

// A warp's share of one layer.
struct LayerShare {
  const Batch* batch;
  QueueShare* share;
  const Iocb* io;
  QueuePair* qp;
  RunState* states;  // of the share, in this layer
  LayerTally* tally;
  u32 layer;
  u32 low;       // every run below was over; a multiple of 32
  bool is_lost;  // a deadline passed in a layer before: its queue is not waited for again

  GIO_HD LayerShare(const Batch* b, u32 l)
      : batch(b),
        share(at<QueueShare>(b->shares) + blockIdx.x),
        io(at<Iocb>(b->iocb)),
        qp(at<QueuePair>(share->qp)),
        states(at<RunState>(b->states) + static_cast<u64>(l) * io->n_runs + share->first_run),
        tally(at<LayerTally>(b->tallies) + l),
        layer(l),
        low(0),
        is_lost(own_load(&share->lost) != 0) {}

  GIO_HD const Run& run(u32 index) const { return at<Run>(io->runs)[share->first_run + index]; }
  // The deadline of this layer's kernel.
  GIO_HD u64 deadline() const { return is_lost ? 0 : deadline_after(batch->timeout_ns); }
};

// Records an error of a layer; the first one is kept.
GIO_HD void note_error(LayerTally* tally, u32 status) { set_if_zero(&tally->status, status); }

// Records the status of every page that a failed run was to move.
GIO_HD void note_run_error(const LayerShare& layer_share, const Run& run, u32 status) {
  note_error(layer_share.tally, status);
  const u64 page_status = at<SliceTable>(layer_share.batch->slices)->page_status;
  const u32 slices = run_slices(*layer_share.io, run);
  for (u32 i = run.first; i < run.first + slices && i < layer_share.io->n_pages; ++i) {
    set_if_zero(&at<u32>(page_status)[i], status);
  }
}

// Builds and enqueues one run's command.  kOk: it is in flight with *cid, or waits for a CID if
// that is kNoCid.  Any other status: it cannot be built.
GIO_HD u32 lane_send(const LayerShare& layer_share, u32 index, u32* cid) {
  *cid = cid_acquire(layer_share.qp, lane_index());
  if (*cid == kNoCid) return kOk;
  const u64 offset = static_cast<u64>(*cid) * layer_share.share->list_nbytes;
  const ListMemory list = {layer_share.share->lists + offset, layer_share.share->lists_dma + offset,
                           layer_share.share->list_nbytes};
  Sqe sqe;
  const u32 status =
      iocb_build(*layer_share.io, layer_share.run(index), layer_share.layer, *cid, list, &sqe);
  if (status != kOk) {
    cid_release(layer_share.qp, *cid);
    *cid = kNoCid;
    return status;
  }
  sq_enqueue(layer_share.qp, sqe);
  return kOk;
}

// Takes the completion of a command, if it has arrived, and releases the CID; returns whether.
GIO_HD bool lane_take(QueuePair* qp, RunState* state, u32* status) {
  const u32 word = completion(qp, state->cid);
  if (word == 0) return false;
  *status = word & ~kCompleted;
  cid_release(qp, state->cid);
  state->cid = kNoCid;
  return true;
}

struct Group {
  bool over;      // every run of the group has ended
  bool starved;   // a lane found no CID
  u32 succeeded;  // lanes whose run ended well in this look
};

// Polls 32 runs, one per lane: takes completions, submits what may be submitted, rings once.
template <typename Doorbell>
GIO_HD Group pump_group(const LayerShare& layer_share, u32 base, u32 limit) {
  const u32 index = base + lane_index();
  const bool exists = index < layer_share.share->n_runs;
  RunState state = {kNoCid, kOk};
  if (exists) state = layer_share.states[index];
  const bool was_open = state.status == kRunPending;
  bool sent = false, starved = false;
  u32 status = kRunPending;
  if (was_open && state.cid != kNoCid) {
    lane_take(layer_share.qp, &state, &status);
  } else if (was_open && index < limit) {
    const u32 refused = lane_send(layer_share, index, &state.cid);
    sent = state.cid != kNoCid;
    starved = !sent && refused == kOk;
    if (refused != kOk) status = refused;
  }
  if (__ballot_sync(kAllLanes, sent) != 0) {
    __syncwarp();  // every mark comes before the try-lock: a warp that fails it may return
    warp_ring<Doorbell>(layer_share.qp);
  }
  const bool ended = was_open && status != kRunPending;
  if (ended || sent) {
    if (ended) state.status = status;
    layer_share.states[index] = state;
  }
  if (ended && status != kOk) note_run_error(layer_share, layer_share.run(index), status);
  const bool open = was_open && !ended;
  return {__ballot_sync(kAllLanes, open) == 0, __ballot_sync(kAllLanes, starved) != 0,
          __ballot_sync(kAllLanes, ended && status == kOk)};
}

struct Poll {
  bool open;    // runs are left
  bool moved;   // something ended
  u32 n_ended;  // runs that ended well, in `ended`
};

// Polls the share once.  Runs below `limit` may be submitted; runs that succeeded are listed in
// `ended` (of `room` entries, at least 32), unless it is null.
template <typename Doorbell>
GIO_HD Poll share_poll(LayerShare* layer_share, u32 limit, u32* ended, u32 room) {
  Poll look = {false, false, 0};
  look.moved = warp_reap<Doorbell>(layer_share->qp) != 0;
  for (u32 base = layer_share->low; base < layer_share->share->n_runs; base += kLanes) {
    if (ended != nullptr && look.n_ended + kLanes > room) {
      look.open = true;
      break;
    }
    const Group group = pump_group<Doorbell>(*layer_share, base, limit);
    if (ended != nullptr && (group.succeeded >> lane_index() & 1u) != 0) {
      const u32 below = group.succeeded & ((1u << lane_index()) - 1);
      ended[look.n_ended + static_cast<u32>(__popc(below))] = base + lane_index();
    }
    look.n_ended += static_cast<u32>(__popc(group.succeeded));
    if (group.over && base == layer_share->low) layer_share->low = base + kLanes;
    look.open = look.open || !group.over;
    if (group.starved || base + kLanes >= limit) {
      look.open = look.open || base + kLanes < layer_share->share->n_runs;
      break;  // no later run can have been sent: they go in order
    }
  }
  return look;
}

// After the deadline: marks commands that have not ended as timed out.  They keep their CIDs.
GIO_HD void share_expire(const LayerShare& layer_share) {
  if (lane_index() == 0) own_store(&layer_share.share->lost, 1);
  for (u32 index = layer_share.low + lane_index(); index < layer_share.share->n_runs;
       index += kLanes) {
    RunState* state = &layer_share.states[index];
    if (state->status != kRunPending) continue;
    state->status = kTimedOut;
    if (state->cid != kNoCid) fetch_add(&layer_share.tally->owned, 1);
    note_run_error(layer_share, layer_share.run(index), kTimedOut);
  }
}

// Whether all runs of the layer before were submitted.  Otherwise this layer would take CIDs that
// the other still needs, and would release them only in its own drain, which comes later.
GIO_HD bool pump_may_lead(const LayerShare& layer_share) {
  if (layer_share.layer == 0 || layer_share.share->n_runs == 0) return true;
  // Groups are submitted in order, so the last one tells.
  const u32 index = (layer_share.share->n_runs - 1) / kLanes * kLanes + lane_index();
  bool is_unsent = false;
  if (index < layer_share.share->n_runs) {
    const RunState state = (layer_share.states - layer_share.io->n_runs)[index];
    is_unsent = state.cid == kNoCid && state.status == kRunPending;
  }
  return __ballot_sync(kAllLanes, is_unsent) == 0;
}

// Submits runs as long as there are CIDs.
template <typename Doorbell>
GIO_HD void share_submit(LayerShare* layer_share) {
  if (layer_share->is_lost || !pump_may_lead(*layer_share)) return;
  share_poll<Doorbell>(layer_share, layer_share->share->n_runs, nullptr, 0);
}

// Runs until every run has ended, or the deadline.  A lost share times out at once.
template <typename Doorbell>
GIO_HD void share_drain(LayerShare* layer_share) {
  const u64 deadline = deadline_after(layer_share->batch->timeout_ns);
  Backoff backoff;
  bool open = true;
  while (open) {  // bounded by the deadline
    Poll look = {true, false, 0};
    const bool is_lost = layer_share->is_lost;
    if (!is_lost) look = share_poll<Doorbell>(layer_share, layer_share->share->n_runs, nullptr, 0);
    open = look.open;
    if (look.moved) {
      backoff.wake();
    } else if (open) {
      backoff.nap();
    }
    const bool is_late = is_lost || now_ns() > deadline;
    if (open && __shfl_sync(kAllLanes, static_cast<u32>(is_late), 0) != 0) {
      share_expire(*layer_share);
      open = false;
    }
  }
}

// Reports the end of a layer; called by all threads of all blocks at the end of its last kernel.
GIO_HD void publish_layer(const Batch* batch, u32 layer) {
  __syncthreads();
  if (threadIdx.x != 0 || batch->flags == 0) return;
  LayerTally* tally = at<LayerTally>(batch->tallies) + layer;
  LayerWord* flag = at<LayerWord>(batch->flags) + layer;
  // Pairs with the other blocks' fetch_add: the last one has seen what all of them moved.
  if (fetch_add(&tally->arrived, 1) != gridDim.x - 1) return;
  own_store(&tally->arrived, 0);
  store_relaxed(&flag->status, own_load(&tally->status));
  // Pairs with the waiters of the layer: a stream's wait, a CPU's or a kernel's load_acquire.
  store_release(&flag->ready, batch->ready);
}

}  // namespace gio

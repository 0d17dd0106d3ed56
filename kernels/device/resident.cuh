// Resident blocks: warp 0 serves the queue, all warps move slices.  persistent_run does all layers.
#pragma once

#include "slices.cuh"

namespace gio {

// Work that warp 0 gives to the block after each poll of the queue.
struct Board {
  static constexpr u32 kRunsMax = 64;
  u32 goes_on;
  Step step;
  u32 n_runs;
  u32 runs[kRunsMax];  // of the share, to be moved or digested now
};

// Warp 0's state of a share.
struct Resident {
  LayerShare layer_share;
  u64 deadline;
  Backoff backoff;
  u32 n_runs;
  u32 listed;    // writes: runs whose slices the block was told to gather
  u32 gathered;  // and has: these may be sent
  bool moves;    // slices pass through this block
  bool reads;
  bool digests;
  bool over;  // every command has ended, or was given up

  GIO_HD Resident(const Batch* batch, u32 layer, const SliceWork& work)
      : layer_share(batch, layer),
        deadline(layer_share.deadline()),
        n_runs(layer_share.share->n_runs),
        listed(0),
        gathered(0),
        moves(work.is_staged() || work.has_digests()),
        reads(moves && work.reads()),
        digests(work.has_digests()),
        over(n_runs == 0) {
    if ((!moves || reads) && !layer_share.is_lost) listed = gathered = n_runs;
  }
};

// Lists the next runs, in order, up to `end`.
GIO_HD u32 list_runs(Board* board, u32 first, u32 end) {
  const u32 left = end - first;
  const u32 n = left < kLanes ? left : kLanes;
  if (lane_index() < n) board->runs[lane_index()] = first + lane_index();
  return n;
}

// Takes completions, submits, times out at the deadline; lists the runs that the block must move.
template <typename Doorbell>
GIO_HD void plan_moves(Resident* resident, Board* board) {
  resident->gathered = resident->listed;  // a barrier ago: the doorbell's release covers it
  u32* ended = resident->reads ? board->runs : nullptr;
  const Poll look =
      share_poll<Doorbell>(&resident->layer_share, resident->gathered, ended, Board::kRunsMax);
  u32 n = resident->reads ? look.n_ended : 0;
  resident->over = !look.open;
  if (!resident->over &&
      __shfl_sync(kAllLanes, static_cast<u32>(now_ns() > resident->deadline), 0) != 0) {
    share_expire(resident->layer_share);
    resident->over = true;
  } else if (resident->listed < resident->n_runs) {
    n = list_runs(board, resident->listed, resident->n_runs);
    resident->listed += n;
  } else if (look.moved) {
    resident->backoff.wake();
  } else if (!resident->over) {
    resident->backoff.nap();
  }
  if (lane_index() != 0) return;
  board->n_runs = n;
  board->step = Step::kMove;
  board->goes_on = !resident->over || (resident->digests && resident->n_runs != 0);
}

// When all parts have arrived: lists the runs whose slices are split over runs, for their digests.
GIO_HD void plan_split(Resident* resident, Board* board, u32* next) {
  const u32 n = list_runs(board, *next, resident->n_runs);
  *next += n;
  if (lane_index() != 0) return;
  board->n_runs = n;
  board->step = Step::kSplit;
  board->goes_on = *next < resident->n_runs;
}

// The block's share of one layer, from the first command to the last slice.
template <typename Doorbell>
GIO_HD void resident_layer(const Batch* batch, u32 layer) {
  GIO_SHARED(Board, board);
  const SliceWork work(batch, layer);
  Resident resident(batch, layer, work);
  u32 next_split = 0;
  bool goes_on = resident.n_runs != 0;
  while (goes_on) {   // bounded by the deadline
    __syncthreads();  // covers what all warps have gathered, and frees the board
    if (warp_index() == 0) {
      if (resident.over) {
        plan_split(&resident, &board, &next_split);
      } else {
        plan_moves<Doorbell>(&resident, &board);
      }
    }
    __syncthreads();  // warp 0's acquire of the completions covers what all warps read now
    goes_on = board.goes_on != 0;
    u32 unit = warp_index();
    for (u32 i = 0; i < board.n_runs; ++i) {
      const Run& run = resident.layer_share.run(board.runs[i]);
      if (board.step == Step::kSplit && !is_split(work, run)) continue;
      unit = block_do(work, run, board.step, unit);
    }
  }
}

// The block's next step, as thread 0 read it.
struct Order {
  u32 goes_on;
  Post post;
};

// Waits for post `next`, for the stop word, or until the idle time-out.
GIO_HD void await_post(const Mailbox& box, u32 next, Order* order) {
  const u64 deadline = deadline_after(box.idle_timeout_ns);
  Backoff backoff;
  bool posted = false, ends = false;
  while (!posted && !ends) {  // bounded by the deadline
    // Pairs with the release of the count, by the host or a stream, after the post and its tables.
    posted = load_acquire(at<u32>(box.posted)) != next;
    ends = load_relaxed(at<u32>(box.stop)) != 0 || now_ns() > deadline;
    if (!posted && !ends) backoff.nap();
  }
  order->goes_on = posted && load_relaxed(at<u32>(box.stop)) == 0;
  if (order->goes_on != 0) order->post = at<Post>(box.posts)[next & (box.capacity - 1)];
}

// Resident across layers.  `consumed` is where an earlier kernel of the same mailbox stopped.
template <typename Doorbell>
GIO_HD void persistent_run(const Mailbox& box) {
  GIO_SHARED(Order, order);
  u32* consumed = &at<u32>(box.consumed)[blockIdx.x];
  u32 next = load_relaxed(consumed);
  if (threadIdx.x == 0) await_post(box, next, &order);
  __syncthreads();
  while (order.goes_on != 0) {  // bounded by the host's posts and the idle time
    const Post post = order.post;
    resident_layer<Doorbell>(at<Batch>(post.batch), post.layer);
    if (post.publish != 0) publish_layer(at<Batch>(post.batch), post.layer);
    __syncthreads();
    ++next;
    if (threadIdx.x == 0) {
      store_release(consumed, next);  // pairs with the host's load before it uses the place again
      await_post(box, next, &order);
    }
    __syncthreads();
  }
}

}  // namespace gio

// The entry points.  parameters.cuh describes their parameters and their order.
#include "resident.cuh"

namespace gio {

// Another processor stages the slices: every block acquires its word itself, as what one block has
// acquired is not visible to another.  False when the word did not come before the deadline.
GIO_HD bool block_await_staged(const Batch* batch, const SliceWork& work) {
  GIO_SHARED(u32, ready);
  if (work.table->staged_flags == 0) return true;
  if (threadIdx.x == 0) {
    const LayerWord* flag = at<LayerWord>(work.table->staged_flags) + work.layer;
    const u64 deadline = deadline_after(batch->timeout_ns);
    Backoff backoff;
    // Pairs with the staging processor's release of the word, after its last slice.
    ready = load_acquire(&flag->ready);
    while (ready == 0 && now_ns() <= deadline) {  // bounded by the deadline
      backoff.nap();
      ready = load_acquire(&flag->ready);  // pairs with the same release
    }
    const u32 status = ready == 0 ? static_cast<u32>(kTimedOut) : load_relaxed(&flag->status);
    if (status != kOk) note_error(work.tally, status);
  }
  __syncthreads();
  return ready != 0;
}

// Gives up every page of the layer.
GIO_HD void grid_give_up(const SliceWork& work) {
  const u32 step = gridDim.x * blockDim.x;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < work.paged->n_pages; i += step) {
    lose_page(work, i, kTimedOut);
  }
}

template <typename Doorbell>
GIO_HD void submit(const Batch* batch, u32 layer) {
  LayerShare layer_share(batch, layer);
  share_submit<Doorbell>(&layer_share);
}

template <typename Doorbell>
GIO_HD void drain(const Batch* batch, u32 layer, u32 publish) {
  LayerShare layer_share(batch, layer);
  share_drain<Doorbell>(&layer_share);
  if (publish != 0) publish_layer(batch, layer);
}

template <typename Doorbell>
GIO_HD void collect(const Batch* batch, u32 layer) {
  share_collect<Doorbell>(LayerShare(batch, layer));
}

template <typename Doorbell>
GIO_HD void resident(const Batch* batch, u32 layer, u32 publish) {
  resident_layer<Doorbell>(batch, layer);
  if (publish != 0) publish_layer(batch, layer);
}

}  // namespace gio

extern "C" {

__global__ void __launch_bounds__(32) gio_submit_word(const gio::Batch* batch, unsigned layer) {
  gio::submit<gio::WordDoorbell>(batch, layer);
}
__global__ void __launch_bounds__(32) gio_submit_mmio(const gio::Batch* batch, unsigned layer) {
  gio::submit<gio::MmioDoorbell>(batch, layer);
}

__global__ void __launch_bounds__(32)
    gio_drain_word(const gio::Batch* batch, unsigned layer, unsigned publish) {
  gio::drain<gio::WordDoorbell>(batch, layer, publish);
}
__global__ void __launch_bounds__(32)
    gio_drain_mmio(const gio::Batch* batch, unsigned layer, unsigned publish) {
  gio::drain<gio::MmioDoorbell>(batch, layer, publish);
}

__global__ void __launch_bounds__(32) gio_collect_word(const gio::Batch* batch, unsigned layer) {
  gio::collect<gio::WordDoorbell>(batch, layer);
}
__global__ void __launch_bounds__(32) gio_collect_mmio(const gio::Batch* batch, unsigned layer) {
  gio::collect<gio::MmioDoorbell>(batch, layer);
}

__global__ void __launch_bounds__(gio::kBlockThreadsMax, 1)
    gio_resident_word(const gio::Batch* batch, unsigned layer, unsigned publish) {
  gio::resident<gio::WordDoorbell>(batch, layer, publish);
}
__global__ void __launch_bounds__(gio::kBlockThreadsMax, 1)
    gio_resident_mmio(const gio::Batch* batch, unsigned layer, unsigned publish) {
  gio::resident<gio::MmioDoorbell>(batch, layer, publish);
}

__global__ void __launch_bounds__(gio::kBlockThreadsMax, 2)
    gio_move(const gio::Batch* batch, unsigned layer, unsigned publish) {
  const gio::SliceWork work(batch, layer);
  if (gio::block_await_staged(batch, work)) {
    gio::grid_do(work, work.way());
  } else {
    gio::grid_give_up(work);
  }
  if (publish != 0) gio::publish_layer(batch, layer);
}

__global__ void __launch_bounds__(gio::kBlockThreadsMax, 2)
    gio_verify(const gio::Batch* batch, unsigned layer, unsigned publish) {
  gio::grid_do(gio::SliceWork(batch, layer), gio::Way::kInPlace);
  if (publish != 0) gio::publish_layer(batch, layer);
}

__global__ void __launch_bounds__(gio::kBlockThreadsMax, 1)
    gio_persistent_word(const gio::Mailbox* mailbox) {
  gio::persistent_run<gio::WordDoorbell>(*mailbox);
}
__global__ void __launch_bounds__(gio::kBlockThreadsMax, 1)
    gio_persistent_mmio(const gio::Mailbox* mailbox) {
  gio::persistent_run<gio::MmioDoorbell>(*mailbox);
}

}  // extern "C"

// The entry points.  parameters.cuh describes their parameters and their order.
#include "resident.cuh"

namespace gio {

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
  gio::grid_do(work, work.way());
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

// The other side of the device tests: queue pairs with doorbells in a BAR page, and two controllers
// for them, the decoding one written from the specification and the memory controller of the
// library.
//
// The BAR page is an emulation: it checks every doorbell that MmioDoorbell writes, in order.
#pragma once

#include <memory>

#include "device_scene.h"
#include "gio_uring/queue_pair.h"

namespace bar {

// The registers of one drive, from offset 1000h on (NVM Express over PCIe Transport Specification
// 1.0, section 3.1.2), and what the rings behind them hold.
struct Page {
  struct Ring {
    const gio::QueuePair* qp;
    gio::u32 tail = 0, head = 0;  // monotonic
  };
  alignas(4096) gio::u32 words[2048] = {};
  gio::u32 stride = 4;  // CAP.DSTRD, in bytes
  std::vector<Ring> rings;
  gio::u64 writes = 0;
  bool is_broken = false;

  gio::u64 doorbell(gio::u32 qid, bool is_cq) {
    return reinterpret_cast<gio::u64>(words) + 0x1000 + (2 * qid + is_cq) * stride;
  }

  void store(gio::u32* p, gio::u32 value) {
    ++writes;
    const gio::u64 offset = reinterpret_cast<gio::u64>(p) - reinterpret_cast<gio::u64>(words);
    const gio::u64 index = (offset - 0x1000) / stride;
    // Queue 0 is the drive's admin queue, which no kernel rings.
    const bool is_register = offset % stride == 0 && index >= 2 && index / 2 <= rings.size();
    if (!is_register || !rings_in_order(&rings[index / 2 - 1], index % 2 != 0, value)) {
      is_broken = true;
      return;
    }
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
  }

 private:
  // The new value goes forward, over finished entries or posted completions alone.
  static bool rings_in_order(Ring* ring, bool is_cq, gio::u32 value) {
    const gio::QueuePair& qp = *ring->qp;
    gio::u32* at = is_cq ? &ring->head : &ring->tail;
    const gio::u32 n = (value - *at) & (qp.depth - 1);
    if (value >= qp.depth || n == 0) return false;
    for (gio::u32 i = 0; i < n; ++i, ++*at) {
      const gio::u32 slot = *at & (qp.depth - 1), lap = *at / qp.depth;
      const gio::u32 mark = gio::at<gio::u32>(qp.marks)[slot];
      const gio::u32 phase = gio::cqe_phase(gio::at<gio::Cqe>(qp.cq)[slot].status);
      if (is_cq ? phase != ((lap & 1u) ^ 1u) : mark != lap + 1) return false;
    }
    return true;
  }
};

inline Page*& active() {
  static Page* page = nullptr;
  return page;
}

}  // namespace bar

#include "decoding_controller.h"
#include "ring_harness.h"
// The library's controller, in this unit so that its accesses to the rings are switch points too.
#include "controller.cpp"
#include "controller_memory.cpp"
#include "controller_memory_faults.cpp"

namespace device {

// A queue pair whose doorbells may be registers of the BAR page.
struct Queue : ring::Queue {
  Queue(u32 depth, u32 qid, bar::Page* page) : ring::Queue(depth, depth - 1, 0) {
    submitter.qid = controller.qid = qid;
    if (page == nullptr) return;
    submitter.sq_doorbell = controller.sq_doorbell = page->doorbell(qid, false);
    submitter.cq_doorbell = controller.cq_doorbell = page->doorbell(qid, true);
  }
  u32 free_cids() const {
    u32 n = 0;
    for (u32 word : cid_free) n += static_cast<u32>(__builtin_popcount(word));
    return n;
  }
};

using Queues = std::vector<std::unique_ptr<Queue>>;

class Drive {
 public:
  virtual ~Drive() = default;
  virtual bool step() = 0;  // a turn of work; false when there was nothing to do
  virtual void answer() {}  // executes and answers what went unanswered
  virtual void read_back(Bytes*) {}
};

// Decodes commands as the specification says; always well.
class DecodingDrive final : public Drive {
 public:
  DecodingDrive(Queues* queues, Scene* scene, u64 seed) {
    for (auto& queue : *queues) {
      controllers_.emplace_back(queue->controller, &scene->medium, scene->shift(), ++seed);
    }
  }
  bool step() override {
    bool moved = false;
    for (auto& controller : controllers_) moved = controller.step() || moved;
    return moved;
  }

 private:
  std::vector<ring::DecodingController> controllers_;
};

class MemoryDrive final : public Drive {
 public:
  MemoryDrive(Queues* queues, Scene* scene, const gio::FaultConfig& faults)
      : nlb_(scene->medium.size() >> scene->shift()), controller_(config(*scene)) {
    controller_.map_medium();
    std::copy(scene->medium.begin(), scene->medium.end(), controller_.medium(1));
    for (Bytes* bytes : {&scene->memory, &scene->staging, &scene->padding}) allow(bytes);
    for (auto& queue : *queues) controller_.attach(queue->submitter);
    controller_.set_faults(faults);
  }
  void allow(Bytes* bytes) {
    if (!bytes->empty()) controller_.memory.add(address_of(*bytes), bytes->size());
  }
  bool step() override { return controller_.service(0) != 0; }
  void answer() override { controller_.answer_all(); }
  void read_back(Bytes* medium) override {
    std::copy_n(controller_.medium(1), medium->size(), medium->begin());
  }

 private:
  gio::MemoryConfig config(const Scene& scene) {
    gio::MemoryConfig c = {};
    c.namespace_nlb = reinterpret_cast<u64>(&nlb_);
    c.namespaces = 1;
    c.lba_shift = scene.shift();
    c.mdts_nbytes = gio::kNlbMax << scene.shift();
    c.sgl_descriptors = 256;
    c.depth_max = 4096;
    c.mode = gio::kModeCopy;
    return c;
  }

  u64 nlb_;
  gio::MemoryController controller_;
};

}  // namespace device

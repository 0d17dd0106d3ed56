// A random geometry for the device kernels: pages, runs, staging, a medium; and what its definition
// (kernels/include/gio_uring/iocb.h) says that memory and medium hold after a transfer.
#pragma once

#include <algorithm>
#include <vector>

#include "fiber.h"  // first: defines GIO_SCHED_POINT
// The headers under test.
#include "gio_uring/iocb.h"
#include "xxh3.h"

namespace device {

using gio::u32;
using gio::u64;
using gio::u8;
using Bytes = std::vector<u8>;

constexpr u64 kPage = 4096;

struct Case {
  u64 seed;
  u32 depth;    // of each queue
  u32 shares;   // blocks that work queues
  u32 warps;    // of a block
  u32 psdt;     // PRP or SGL
  u32 aligned;  // 1: segments are whole memory pages
  u32 opcode;   // read or write
  u32 mmio;     // 1: doorbells are registers of an emulated BAR page
  u32 engine;   // 0 submit and drain, 1 resident, 2 persistent, 3 as 0 with reads sent ahead
  u32 staged;   // 1: through staging memory
  u32 digests;  // 1: computed and compared
  u32 faults;   // of the controller: 0 none, 1 statuses and delays, 2 silence, 3 silent short reads
};

inline u32 between(fiber::Random* random, u32 low, u32 high) {
  return low + random->below(high - low + 1);
}
inline u64 page_start(Bytes& bytes) {
  return (reinterpret_cast<u64>(bytes.data()) + kPage - 1) & -kPage;
}
template <typename T>
u64 address_of(std::vector<T>& v) {
  return reinterpret_cast<u64>(v.data());
}

// Where a byte of a run's data belongs; page is an index into Iocb::pages.
struct Place {
  u32 page;
  u64 address;  // 0 for padding
};

class Scene {
 public:
  gio::Iocb paged = {};   // the pages
  gio::Iocb issued = {};  // what the controller is asked to move: pages or staging
  std::vector<u32> pages, staged_pages;
  std::vector<u64> bases, staged_bases, digests;
  std::vector<gio::Run> runs;
  u64 staged_stride = 0;
  u32 slice_payload = 0;  // bytes of a slice without padding
  Bytes memory, staging, padding, medium;

  Scene(const Case& c, fiber::Random* random) : is_staged_(c.staged != 0) {
    paged.opcode = c.opcode;
    paged.psdt = c.psdt;
    paged.lba_shift = random->below(2) ? 9 : 12;
    paged.n_layers = c.engine == 3 ? between(random, 3, 4) : between(random, 1, 2);
    paged.n_segments = between(random, 1, gio::kSegmentsMax);
    paged.n_pages = between(random, 1, 10);
    n_slots_ = paged.n_pages + random->below(4);
    draw_segments(c.aligned != 0, random);
    draw_pages(random);
    draw_runs(c, random);
    fill(&medium, (static_cast<u64>(paged.layer_stride_nlb) * paged.n_layers + 64) << shift(),
         random);
    paged.runs = address_of(runs);
    paged.pages = address_of(pages);
    paged.bases = address_of(bases);
    issued = paged;
    if (is_staged_) draw_staging(c.aligned != 0, random);
    if (c.digests != 0) set_digests();
  }

  u32 shift() const { return paged.lba_shift; }
  u64 run_nbytes(const gio::Run& run) const { return static_cast<u64>(run.nlb) << shift(); }

  // Where byte `position` of a run's data belongs.
  Place place_of(const gio::Run& run, u32 layer, u64 position) const {
    const u64 from_first = run.skip + position;
    const u32 index = run.first + static_cast<u32>(from_first / slice_nbytes());
    u64 offset = from_first % slice_nbytes();
    for (u32 k = 0; k < paged.n_segments; ++k) {
      if (offset < paged.segment_nbytes[k]) {
        const u64 base = bases[layer * paged.n_segments + k];
        return {index, base + pages[index] * paged.segment_stride[k] + offset};
      }
      offset -= paged.segment_nbytes[k];
    }
    return {index, 0};
  }
  u64 medium_of(const gio::Run& run, u32 layer, u64 position) const {
    return ((run.slba + static_cast<u64>(layer) * paged.layer_stride_nlb) << shift()) + position;
  }
  // The digest of one slice as the medium (reads) or the pages (writes) have it.
  u64 digest_of(u32 layer, u32 page) const {
    Bytes slice;
    for (const gio::Run& run : runs) {
      for (u64 i = 0; i < run_nbytes(run); ++i) {
        const Place place = place_of(run, layer, i);
        if (place.page != page || place.address == 0) continue;
        slice.push_back(paged.opcode == gio::kRead ? medium[medium_of(run, layer, i)]
                                                   : *gio::at<const u8>(place.address));
      }
    }
    return tutti::xxh3_64(slice.data(), slice.size());
  }

 private:
  static void fill(Bytes* bytes, u64 nbytes, fiber::Random* random) {
    bytes->resize(nbytes);
    for (u8& byte : *bytes) byte = static_cast<u8>(random->next());
  }
  u32 slice_nbytes() const { return paged.slice_nlb << shift(); }

  void draw_segments(bool aligned, fiber::Random* random) {
    // Odd sizes, or sizes of whole 16 bytes, which the kernels move differently.
    const u32 unit = aligned ? kPage : random->below(2) ? 16 : 1;
    const u32 longest = aligned ? 1 : (random->below(3) ? 3000 : 60) / unit;
    for (u32 k = 0; k < paged.n_segments; ++k) {
      const u32 nbytes = between(random, 1, std::max(1u, longest)) * unit;
      const u32 gap = random->below(2) ? 0 : aligned ? kPage : random->below(6) * unit;
      paged.segment_nbytes[k] = nbytes;
      paged.segment_stride[k] = nbytes + gap;
      slice_payload += nbytes;
    }
    const u32 lba = 1u << shift();
    paged.slice_nlb = (slice_payload + lba - 1) >> shift();
    // A whole block of padding; for PRP it must not end within a memory page.
    const bool room = slice_payload % lba == 0 && (lba == kPage || !aligned);
    if (room && random->below(3) == 0) ++paged.slice_nlb;
    std::vector<u64> offsets;
    u64 nbytes = 0;
    for (u32 i = 0; i < paged.n_layers * paged.n_segments; ++i) {
      offsets.push_back(nbytes);
      nbytes += paged.segment_stride[i % paged.n_segments] * n_slots_ + (aligned ? kPage : 16);
      nbytes = (nbytes + 15) & -16ull;
      if (aligned) nbytes = (nbytes + kPage - 1) & -kPage;
    }
    fill(&memory, nbytes + kPage, random);
    for (u64 offset : offsets) bases.push_back(page_start(memory) + offset);
    padding.assign(2 * kPage, 0);
    paged.padding = page_start(padding);
  }

  void draw_pages(fiber::Random* random) {
    std::vector<u32> slots(n_slots_);
    for (u32 i = 0; i < n_slots_; ++i) slots[i] = i;
    for (u32 i = n_slots_; i > 1; --i) std::swap(slots[i - 1], slots[random->below(i)]);
    if (random->below(4) == 0) std::sort(slots.begin(), slots.end());  // extents that join
    pages.assign(slots.begin(), slots.begin() + paged.n_pages);
  }

  // Runs of whole slices, or of any blocks.
  void draw_runs(const Case& c, fiber::Random* random) {
    const u32 blocks = paged.n_pages * paged.slice_nlb;
    const u32 unit = random->below(2) ? paged.slice_nlb : 1;
    const u32 longest = between(random, 1, unit == 1 ? 2 * paged.slice_nlb : 3);
    for (u32 at = 0; at < blocks;) {
      const u32 nlb = std::min(blocks - at, between(random, 1, longest) * unit);
      const u32 skip = (at % paged.slice_nlb) << shift();
      runs.push_back({8 + at, 1, nlb, at / paged.slice_nlb, skip});
      at += nlb;
    }
    (void)c;
    paged.n_runs = static_cast<u32>(runs.size());
    paged.layer_stride_nlb = blocks + random->below(5);
  }

  // Staging for every layer; what the controller sees is one segment a slice.
  void draw_staging(bool aligned, fiber::Random* random) {
    const u64 unit = aligned ? kPage : random->below(2) ? 16 : 1;
    staged_stride = (slice_payload + unit - 1) / unit * unit;
    const u64 layer_nbytes = (staged_stride * paged.n_pages + kPage - 1) & -kPage;
    fill(&staging, layer_nbytes * paged.n_layers + kPage, random);
    for (u32 layer = 0; layer < paged.n_layers; ++layer) {
      staged_bases.push_back(page_start(staging) + layer * layer_nbytes);
    }
    for (u32 i = 0; i < paged.n_pages; ++i) staged_pages.push_back(i);
    issued.n_segments = 1;
    issued.segment_nbytes[0] = slice_payload;
    issued.segment_stride[0] = staged_stride;
    issued.pages = address_of(staged_pages);
    issued.bases = address_of(staged_bases);
  }

  void set_digests() {
    digests.assign(static_cast<size_t>(paged.n_pages) * paged.n_layers, 0);
    if (paged.opcode != gio::kRead) return;
    for (u32 i = 0; i < paged.n_pages; ++i) {
      for (u32 l = 0; l < paged.n_layers; ++l) digests[i * paged.n_layers + l] = digest_of(l, i);
    }
  }

  bool is_staged_;
  u32 n_slots_;  // pages in engine memory; n_pages of them are named
};

}  // namespace device

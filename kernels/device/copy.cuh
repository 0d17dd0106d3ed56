// Moving bytes by a warp: 16 bytes a lane where everything is aligned, and never through a path
// that is not coherent.
//
// Who reads staging that another processor wrote has acquired a word that this processor released:
// a CQE, a layer's flag, or the stream's own order at the kernel's start.  Loads here are weak and
// come after that in program order or behind a barrier.
#pragma once

#include "block.cuh"

namespace gio {

struct alignas(16) Quad {
  u32 x, y, z, w;
};

GIO_HD Quad load_quad(u64 address) {
#if GIO_DEVICE
  Quad v;
  // Orders nothing, pairs with nothing: volatile keeps the load behind the acquire before it.
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
#else
  return *at<const Quad>(address);
#endif
}

GIO_HD void store_quad(u64 address, const Quad& v) { *at<Quad>(address) = v; }

// Loads that a lane has under way at once: PCIe answers after a microsecond.
constexpr u32 kLoadsInFlight = 8;

GIO_HD void warp_copy_quads(u64 to, u64 from, u32 nbytes) {
  const u32 step = kLanes * sizeof(Quad);
  for (u32 base = lane_index() * sizeof(Quad); base < nbytes; base += step * kLoadsInFlight) {
    Quad quads[kLoadsInFlight];
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; ++i) {
      if (base + i * step < nbytes) quads[i] = load_quad(from + base + i * step);
    }
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; ++i) {
      if (base + i * step < nbytes) store_quad(to + base + i * step, quads[i]);
    }
  }
}

GIO_HD void warp_copy_bytes(u64 to, u64 from, u32 nbytes) {
  for (u32 i = lane_index(); i < nbytes; i += kLanes) *at<u8>(to + i) = *at<u8>(from + i);
}

// Copies between memory that does not overlap, by the whole warp.
GIO_HD void warp_copy(u64 to, u64 from, u32 nbytes) {
  if (((to | from | nbytes) & 15u) == 0) {
    warp_copy_quads(to, from, nbytes);
  } else {
    warp_copy_bytes(to, from, nbytes);
  }
}

}  // namespace gio

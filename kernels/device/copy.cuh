// Moves bytes by a warp: 16 bytes per lane if everything is aligned, else 4 or 1, with several
// loads in flight per lane, and only through coherent paths.
//
// A reader of staging that another processor wrote has acquired a CQE that the writer released, or
// starts after the writer in stream order.  The loads here are weak, and follow that in program
// order or after a barrier.
#pragma once

#include "block.cuh"

namespace gio {

struct alignas(16) Quad {
  u32 x, y, z, w;
};

template <typename Unit>
GIO_HD Unit load_unit(u64 address) {
  return *at<const Unit>(address);
}

template <>
GIO_HD Quad load_unit<Quad>(u64 address) {
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

template <typename Unit>
GIO_HD void store_unit(u64 address, const Unit& v) {
  *at<Unit>(address) = v;
}

// Loads in flight per lane: a load over PCIe takes about a microsecond.
constexpr u32 kLoadsInFlight = 8;

template <typename Unit>
GIO_HD void warp_copy_units(u64 to, u64 from, u32 nbytes) {
  const u32 step = kLanes * sizeof(Unit);
  for (u32 base = lane_index() * sizeof(Unit); base < nbytes; base += step * kLoadsInFlight) {
    Unit units[kLoadsInFlight] = {};
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; ++i) {
      if (base + i * step < nbytes) units[i] = load_unit<Unit>(from + base + i * step);
    }
    GIO_UNROLL
    for (u32 i = 0; i < kLoadsInFlight; ++i) {
      if (base + i * step < nbytes) store_unit(to + base + i * step, units[i]);
    }
  }
}

// Copies between ranges that do not overlap, by the whole warp.
GIO_HD void warp_copy(u64 to, u64 from, u32 nbytes) {
  const u64 bits = to | from | nbytes;
  if ((bits & (sizeof(Quad) - 1)) == 0) {
    warp_copy_units<Quad>(to, from, nbytes);
  } else if ((bits & (sizeof(u32) - 1)) == 0) {
    warp_copy_units<u32>(to, from, nbytes);
  } else {
    warp_copy_units<u8>(to, from, nbytes);
  }
}

}  // namespace gio

// Services of a thread block for the kernels: shared memory, a clock, a way to wait.
//
// Compiled by NVRTC for the GPU, and by g++ for tests, after a header that implements CUDA's
// built-ins on fibers.
#pragma once

#include "gio_uring/atomics.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GIO_SHARED(type, name) __shared__ type name
#define GIO_UNROLL _Pragma("unroll")
// For long functions that run rarely: one copy per kernel instead of one per caller.
#define GIO_CALLED __device__ __noinline__
#else
#define GIO_UNROLL
#define GIO_CALLED inline
#endif

namespace gio {

constexpr u32 kLanes = 32;
constexpr u32 kAllLanes = 0xffffffffu;

GIO_HD u32 lane_index() { return threadIdx.x % kLanes; }
GIO_HD u32 warp_index() { return threadIdx.x / kLanes; }
GIO_HD u32 block_warps() { return blockDim.x / kLanes; }

GIO_HD u64 now_ns() {
#if GIO_DEVICE
  u64 now;
  // Pairs with nothing: volatile keeps the clock from being read once.
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return simt::now_ns();
#endif
}

// The deadline of a wait, by the GPU's clock.  One beyond the clock's range is never reached.
GIO_HD u64 deadline_after(u64 timeout_ns) {
  const u64 now = now_ns();
  return now + timeout_ns < now ? ~0ull : now + timeout_ns;
}

// Exponential backoff while polling: each empty poll doubles the sleep.
struct Backoff {
  static constexpr u32 kNapMinNs = 32;
  static constexpr u32 kNapMaxNs = 2048;

  u32 nap_ns = kNapMinNs;

  GIO_HD void nap() {
    __nanosleep(nap_ns);
    if (nap_ns < kNapMaxNs) nap_ns *= 2;
  }
  GIO_HD void wake() { nap_ns = kNapMinNs; }
};

}  // namespace gio

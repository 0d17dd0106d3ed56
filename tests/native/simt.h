// The CUDA words that a one-warp kernel uses, on fibers: one fiber a lane.
//
// Collectives take the full mask only, and every lane must reach them; a lane that does not is a
// deadlock, which the scheduler reports.
#pragma once

#include <cassert>
#include <cstring>
#include <memory>
#include <vector>

#include "fiber.h"

#define __global__
#define __device__
#define __launch_bounds__(...)

namespace simt {

constexpr unsigned kLanes = 32;

struct Index {
  unsigned x, y, z;
};

struct Warp {
  size_t fibers[kLanes];
  unsigned arrived = 0;
  unsigned long long words[kLanes];
};

struct Lane {
  Warp* warp;
  Index thread, block, grid;
};

inline Lane& lane() { return *static_cast<Lane*>(fiber::Scheduler::active()->local()); }

// Every lane waits here for the other 31.
inline void converge() {
  fiber::Scheduler& scheduler = *fiber::Scheduler::active();
  Warp& warp = *lane().warp;
  if (++warp.arrived < kLanes) return scheduler.park();
  warp.arrived = 0;
  for (size_t other : warp.fibers) {
    if (other != scheduler.self()) scheduler.unpark(other);
  }
}

// Lane `source`'s value, for every lane.
template <typename T>
T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(unsigned long long), "one register");
  assert(mask == 0xffffffffu);
  Warp& warp = *lane().warp;
  std::memcpy(&warp.words[lane().thread.x], &value, sizeof value);
  converge();
  T result;
  std::memcpy(&result, &warp.words[source % kLanes], sizeof result);
  converge();
  return result;
}

// The lanes whose predicate holds, as bits.
inline unsigned ballot(unsigned mask, bool predicate) {
  assert(mask == 0xffffffffu);
  Warp& warp = *lane().warp;
  warp.words[lane().thread.x] = predicate;
  converge();
  unsigned bits = 0;
  for (unsigned i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(warp.words[i] != 0) << i;
  converge();
  return bits;
}

// Time is the number of switch points, so that a deadline replays with the seed.
inline unsigned long long now_ns() { return fiber::Scheduler::active()->steps(); }

// Holds the lanes of a launch; outlives the scheduler's run.
class Launch {
 public:
  template <typename Kernel>
  void spawn(fiber::Scheduler* scheduler, unsigned blocks, const Kernel& kernel) {
    for (unsigned block = 0; block < blocks; ++block) {
      warps_.push_back(std::make_unique<Warp>());
      for (unsigned i = 0; i < kLanes; ++i) {
        const Index grid = {blocks, 1, 1};
        lanes_.push_back(
            std::make_unique<Lane>(Lane{warps_.back().get(), {i, 0, 0}, {block, 0, 0}, grid}));
        warps_.back()->fibers[i] = scheduler->spawn(kernel, 1, lanes_.back().get());
      }
    }
  }

 private:
  std::vector<std::unique_ptr<Warp>> warps_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace simt

#define threadIdx (::simt::lane().thread)
#define blockIdx (::simt::lane().block)
#define gridDim (::simt::lane().grid)
#define blockDim (::simt::Index{::simt::kLanes, 1, 1})
#define __syncwarp() ::simt::converge()
#define __shfl_sync(mask, value, source) ::simt::shuffle(mask, value, source)
#define __ballot_sync(mask, predicate) ::simt::ballot(mask, predicate)
#define __nanosleep(ns) ::fiber::switch_point()

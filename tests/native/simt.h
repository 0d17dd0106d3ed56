// The CUDA words that the kernels use, on fibers: one fiber a thread, 32 of them a warp.
//
// Collectives take the full mask only, and every lane of the warp, or every thread of the block,
// must reach them; one that does not is a deadlock, which the scheduler reports.
#pragma once

#include <cassert>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "fiber.h"

// Called, not inlined: twelve kernels hold the same functions.
#define GIO_HD inline
// Time is the number of switch points, so that a deadline replays with the seed, unless a program
// whose fibers wait for other threads says otherwise.
#ifndef SIMT_NOW_NS
#define SIMT_NOW_NS() ::fiber::Scheduler::active()->steps()
#define SIMT_NAP() ((void)0)
#endif
#define __global__
#define __device__
#define __launch_bounds__(...)

namespace simt {

constexpr unsigned kLanes = 32;

struct Index {
  unsigned x, y, z;
};

// Who waits for whom: the lanes of a warp, or the threads of a block.
struct Meeting {
  std::vector<size_t> fibers;
  size_t arrived = 0;

  void converge() {
    fiber::Scheduler& scheduler = *fiber::Scheduler::active();
    if (++arrived < fibers.size()) return scheduler.park();
    arrived = 0;
    for (size_t other : fibers) {
      if (other != scheduler.self()) scheduler.unpark(other);
    }
  }
};

struct Warp {
  Meeting lanes;
  // Collectives take turns: who writes for the next one cannot meet a reader of the last one, as
  // all lanes have met in between.
  unsigned long long words[2][kLanes];
};

// A block's shared memory holds one object for each place in the source that declares one.
struct Block {
  Meeting threads;
  std::map<const void*, std::shared_ptr<void>> shared;
};

struct Lane {
  Warp* warp;
  Block* block_state;
  Index thread, block, grid, size;
  unsigned turn = 0;
  unsigned index() const { return thread.x % kLanes; }
};

inline Lane& lane() { return *static_cast<Lane*>(fiber::Scheduler::active()->local()); }

// Every lane waits here for the other 31.
inline void converge() { lane().warp->lanes.converge(); }

// Every thread waits here for the others of its block.
inline void converge_block() { lane().block_state->threads.converge(); }

// Like shared memory, it is not cleared: a pattern stands there at first.
template <typename T>
T& shared(const void* place) {
  std::shared_ptr<void>& object = lane().block_state->shared[place];
  if (object == nullptr) {
    object = std::make_shared<T>();
    std::memset(object.get(), 0xa5, sizeof(T));
  }
  return *static_cast<T*>(object.get());
}

// What every lane of the warp gave to this collective.
template <typename T>
const unsigned long long* gather(unsigned mask, T value) {
  static_assert(sizeof(T) <= sizeof(unsigned long long), "one register");
  assert(mask == 0xffffffffu);
  unsigned long long* words = lane().warp->words[lane().turn ^= 1];
  words[lane().index()] = 0;
  std::memcpy(&words[lane().index()], &value, sizeof value);
  converge();
  return words;
}

// Returns the value of lane `source` to each lane.
template <typename T>
T shuffle(unsigned mask, T value, unsigned source) {
  T result;
  std::memcpy(&result, &gather(mask, value)[source % kLanes], sizeof result);
  return result;
}

// The lanes whose predicate holds, as bits.
inline unsigned ballot(unsigned mask, bool predicate) {
  const unsigned long long* words = gather(mask, predicate);
  unsigned bits = 0;
  for (unsigned i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(words[i] != 0) << i;
  return bits;
}

inline unsigned long long now_ns() { return SIMT_NOW_NS(); }

// Holds the threads of a launch; outlives the scheduler's run.
class Launch {
 public:
  template <typename Kernel>
  void spawn(fiber::Scheduler* scheduler, unsigned blocks, unsigned warps, const Kernel& kernel) {
    for (unsigned block = 0; block < blocks; ++block) {
      blocks_.push_back(std::make_unique<Block>());
      for (unsigned i = 0; i < warps * kLanes; ++i) {
        if (i % kLanes == 0) warps_.push_back(std::make_unique<Warp>());
        const Index grid = {blocks, 1, 1}, size = {warps * kLanes, 1, 1};
        const Lane lane = {
            warps_.back().get(), blocks_.back().get(), {i, 0, 0}, {block, 0, 0}, grid, size, 0};
        lanes_.push_back(std::make_unique<Lane>(lane));
        const size_t fiber = scheduler->spawn(kernel, 1, lanes_.back().get());
        warps_.back()->lanes.fibers.push_back(fiber);
        blocks_.back()->threads.fibers.push_back(fiber);
      }
    }
  }

 private:
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace simt

#define threadIdx (::simt::lane().thread)
#define blockIdx (::simt::lane().block)
#define gridDim (::simt::lane().grid)
#define blockDim (::simt::lane().size)
#define __syncwarp() ::simt::converge()
#define __syncthreads() ::simt::converge_block()
#define __shfl_sync(mask, value, source) ::simt::shuffle(mask, value, source)
#define __shfl_xor_sync(mask, value, apart) \
  ::simt::shuffle(mask, value, ::simt::lane().index() ^ (apart))
#define __ballot_sync(mask, predicate) ::simt::ballot(mask, predicate)
#define __popc(word) __builtin_popcount(word)
#define __nanosleep(ns) ((void)(ns), SIMT_NAP(), ::fiber::switch_point())
#define GIO_SHARED(type, name)        \
  static const char name##_place = 0; \
  type& name = ::simt::shared<type>(&name##_place)

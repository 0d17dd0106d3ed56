// The device kernels on fibers, as the stand-in of libcuda.so.1 launches them: by name, with the
// parameters that each one's own signature takes, any number of launches at once.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

// Kernels wait for a controller that has a clock of its own, and leave it the processor meanwhile.
inline unsigned long long clock_now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}
#define SIMT_NOW_NS() ::clock_now_ns()
#define SIMT_NAP() ((void)sched_yield())

#include "simt.h"  // words of CUDA, before the kernels
// The kernels under test.
#include "kernels.cu"

namespace machine {

// A launch with its parameters: what every thread of it calls.
using Call = std::function<void()>;

template <typename... A, size_t... I>
Call capture(void (*kernel)(A...), void** parameters, std::index_sequence<I...>) {
  std::tuple<A...> values;
  (std::memcpy(&std::get<I>(values), parameters[I], sizeof(A)), ...);
  return [kernel, values] { std::apply(kernel, values); };
}

// Copies the values that `parameters` points to, as the kernel's signature says.
template <typename... A>
Call capture(void (*kernel)(A...), void** parameters) {
  return capture(kernel, parameters, std::index_sequence_for<A...>());
}

struct Kernel {
  const char* name;
  unsigned threads_max;  // as its __launch_bounds__
  std::function<Call(void** parameters)> capture;
};

#define KERNEL(name, threads)                                                   \
  Kernel {                                                                      \
    #name, threads, [](void** parameters) { return capture(name, parameters); } \
  }
#define KERNELS(name, threads) KERNEL(name##_word, threads), KERNEL(name##_mmio, threads)

inline const Kernel kKernels[] = {
    KERNELS(gio_submit, 32),
    KERNELS(gio_drain, 32),
    KERNELS(gio_resident, gio::kBlockThreadsMax),
    KERNELS(gio_persistent, gio::kBlockThreadsMax),
    KERNEL(gio_move, gio::kBlockThreadsMax),
    KERNEL(gio_verify, gio::kBlockThreadsMax),
};

// False when threads of the kernel wait for each other.
inline bool run_kernel(const Call& call, unsigned blocks, unsigned threads) {
  fiber::Scheduler scheduler(blocks);
  simt::Launch launch;
  launch.spawn(&scheduler, blocks, threads / simt::kLanes, call);
  return scheduler.run(~0ull >> 1);
}

}  // namespace machine

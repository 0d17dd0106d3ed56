// The device kernels on fibers as a library: the stand-in of the CUDA driver launches them, with
// the tables that the host side made, against a controller's own thread.  One launch at a time.
//
// Time stands still for them as far as it matters: a nanosecond is a switch point.
#include <mutex>
#include <string>

#include "simt.h"  // first: words of CUDA
// The kernels under test.
#include "kernels.cu"

namespace {

using gio::u32;
using gio::u64;

// What any kernel takes, as far as it takes it.
struct Arguments {
  u64 table;  // Batch or Mailbox
  u32 layer, publish;
  const gio::Batch* batch() const { return gio::at<const gio::Batch>(table); }
};

void call(const std::string& name, const Arguments& a) {
  if (name == "gio_submit_word") return gio_submit_word(a.batch(), a.layer);
  if (name == "gio_drain_word") return gio_drain_word(a.batch(), a.layer, a.publish);
  if (name == "gio_resident_word") return gio_resident_word(a.batch(), a.layer, a.publish);
  if (name == "gio_move") return gio_move(a.batch(), a.layer, a.publish);
  if (name == "gio_persistent_word") {
    return gio_persistent_word(gio::at<const gio::Mailbox>(a.table));
  }
  std::abort();
}

}  // namespace

// Returns when every thread of the kernel has; 1 when they wait for each other.
extern "C" int launch_kernel(const char* name, u64 seed, u32 blocks, u32 threads, u64 table,
                             u32 layer, u32 publish) {
  static std::mutex one;
  const std::lock_guard<std::mutex> lock(one);
  const Arguments arguments = {table, layer, publish};
  const std::string kernel = name;
  fiber::Scheduler scheduler(seed);
  simt::Launch launch;
  launch.spawn(&scheduler, blocks, threads / simt::kLanes, [&] { call(kernel, arguments); });
  return scheduler.run(~0ull >> 1) ? 0 : 1;
}

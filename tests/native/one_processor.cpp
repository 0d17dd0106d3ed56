// A library for LD_PRELOAD under which every thread believes to run on processor 0, wherever it
// asks to be.
#include <sched.h>

#include <atomic>

namespace {

std::atomic<int> away{0};
std::atomic<int> anywhere{0};

}  // namespace

extern "C" {

int sched_getcpu() noexcept { return 0; }

int sched_setaffinity(pid_t, size_t, const cpu_set_t* processors) noexcept {
  ++(CPU_ISSET(0, processors) ? anywhere : away);
  return 0;
}

// How often a thread asked for all processors but 0, and for 0 too.
int asked_away() { return away; }
int asked_anywhere() { return anywhere; }
}

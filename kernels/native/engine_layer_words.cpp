// The host engine's accesses to the words shared with the mover of a job's staging memory.
#include <algorithm>

#include "drive_loop.h"

namespace gio {
namespace {

// Interval of polls of the words: nothing wakes the thread when a GPU writes one.
constexpr u64 kLookNs = 20'000;
constexpr u64 kLookMostNs = 500'000;

}  // namespace

// Whether the submitter and the mover permit the layer of the next command: its place in staging
// is free (reads) or filled (writes).
bool ServiceThread::is_granted(const Part& part) const {
  return part.next / part.n_runs < part.job->granted;
}

bool ServiceThread::may_issue(const Part& part) const {
  const JobConfig& config = part.job->config;
  if (!is_granted(part)) return false;
  if (config.words == 0) return true;
  // Pairs with the mover's write of `moved`, which follows its copies.
  const u64 moved = load_acquire(&at<LayerWords>(config.words)->moved);
  return moved + config.window > part.next / part.n_runs;
}

// Handles parts that wait for their mover: continues them if it has caught up, or times them out.
void ServiceThread::run_blocked(u64 now) {
  if (blocked_.empty()) {
    mover_ns_ = kLookNs;
    return;
  }
  mover_ns_ = std::min(2 * mover_ns_, kLookMostNs);
  for (auto next = blocked_.begin(); next != blocked_.end();) {
    const auto here = next++;
    Part* part = here->part;
    Job* job = part->job;
    if (now > part->blocked_ns + job->config.timeout_ns) engine_->abandon(job, kTimedOut);
    if (!job->done && !may_issue(*part)) continue;
    mover_ns_ = kLookNs;
    part->place = blocked_.extract(here);
    list(part);
  }
}

// Reports to the mover that layers have arrived or failed; stores the status first.
void Engine::tell_layers(Job* job, u32 from, u32 to) {
  if (job->config.words == 0) return;
  LayerWords* words = at<LayerWords>(job->config.words);
  for (u32 layer = from; layer < to; ++layer) {
    words->layers[layer].status = job->status;
    store_release(&words->layers[layer].ready, 1);  // pairs with the mover's wait for it
  }
}

}  // namespace gio

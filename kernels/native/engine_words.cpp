// The host engine's side of the words that it shares with the mover of a job's staging memory.
#include <algorithm>

#include "engine.h"

namespace gio {
namespace {

// How often the words are looked at: nothing wakes the thread when a GPU writes one.
constexpr u64 kLookNs = 20'000;
constexpr u64 kLookMostNs = 500'000;

}  // namespace

// Whether the mover lets the next command's layer begin: its place in the staging memory is free
// (reads), or filled (writes).
bool Engine::may_issue(const Job* job) const {
  if (job->config.words == 0) return true;
  const u64 layer = job->next_command / job->config.iocb.n_runs;
  // Pairs with the mover's write of `moved`, which follows its copies.
  const u64 moved = load_acquire(&at<LayerWords>(job->config.words)->moved);
  return moved + job->config.window > layer;
}

// Jobs whose mover is behind: on with those it caught up with, and an end to those it left.
void Engine::run_blocked(u64 now) {
  if (blocked_.empty()) {
    mover_ns_ = kLookNs;
    return;
  }
  mover_ns_ = std::min(2 * mover_ns_, kLookMostNs);
  Job* next = blocked_.front();
  while (Job* job = next) {  // bounded by the list: what is done here adds to no job's stay in it
    next = blocked_.after(job);
    if ((job->cancel || stop_) && !job->done) abandon(job, kCancelled);
    if (!job->done && now > job->blocked_ns + job->config.timeout_ns) abandon(job, kTimedOut);
    if (job->next_command < job->n_commands && !may_issue(job)) continue;
    blocked_.remove(job);
    mover_ns_ = kLookNs;
    if (job->next_command < job->n_commands) {
      ready_[std::min(job->config.priority, kPriorities - 1)].push_front(job);
    }
    maybe_release(job);
  }
}

// Tells the mover that layers are in memory, or that they never will be: the status first.
void Engine::tell_layers(Job* job, u32 from, u32 to) {
  if (job->config.words == 0) return;
  LayerWords* words = at<LayerWords>(job->config.words);
  for (u32 layer = from; layer < to; ++layer) {
    words->layers[layer].status = job->status;
    store_release(&words->layers[layer].ready, 1);  // pairs with the mover's wait for it
  }
}

}  // namespace gio

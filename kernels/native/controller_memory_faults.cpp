// Fault injection of the memory controller: faults drawn from a seed, and a write cache whose
// content a power cut loses.
#include <algorithm>

#include "controller_memory.h"

namespace gio {

namespace {

constexpr u32 kMillion = 1'000'000;
constexpr u64 kCacheNbytes = 64ull << 20;

// SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
class Random {
 public:
  explicit Random(u64 seed) : state_(seed) {}

  u64 next() {
    state_ += 0x9e3779b97f4a7c15ull;
    u64 z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  // Uniform below n, which is small: the bias of the remainder is below n / 2^64.
  u64 below(u64 n) { return next() % n; }
  bool hits(u32 ppm) { return below(kMillion) < ppm; }

 private:
  u64 state_;
};

}  // namespace

void FaultPlan::set(const FaultConfig& faults) {
  config = faults;
  ranges_.clear();
  n_ = 0;
  is_active_ =
      faults.stall_from != 0 || (faults.status_ppm | faults.delay_ppm | faults.reorder_ppm |
                                 faults.torn_ppm | faults.lost_ppm | faults.short_ppm) != 0;
}

// Draws every fault for every command, so that a change of one probability does not affect others.
Verdict FaultPlan::judge(const Sqe& sqe) {
  Verdict verdict;
  ++n_;
  Random random(Random(config.seed + n_).next());
  const bool is_write = sqe_opcode(sqe) == kWrite;
  const bool is_transfer = is_write || sqe_opcode(sqe) == kRead;
  const bool fails = random.hits(config.status_ppm);
  const bool is_delayed = random.hits(config.delay_ppm);
  const u32 turns = 1 + static_cast<u32>(random.below(std::max(config.delay_turns, 1u)));
  const bool is_reordered = random.hits(config.reorder_ppm);
  const u64 order = random.next() | 1u;
  const bool is_torn = random.hits(config.torn_ppm) && is_write;
  const bool is_lost = random.hits(config.lost_ppm) && is_write;
  const bool is_short = random.hits(config.short_ppm) && is_transfer;
  const u32 percent = static_cast<u32>(random.below(100));

  verdict.is_unanswered = config.stall_from != 0 && n_ >= config.stall_from;
  verdict.is_held = is_delayed || is_reordered;
  verdict.delay_turns = is_delayed ? turns : 0;
  verdict.order = is_reordered ? order : 0;
  verdict.status = match_range(sqe);
  if (verdict.status != kOk) return verdict;
  if (fails) {
    verdict.status = config.status;
  } else if (is_torn || is_short) {
    verdict.percent = percent;
    verdict.status = is_torn ? config.torn_status : config.short_status;
  } else {
    verdict.is_lost = is_lost;
  }
  return verdict;
}

u32 FaultPlan::match_range(const Sqe& sqe) {
  const bool is_transfer = sqe_opcode(sqe) == kWrite || sqe_opcode(sqe) == kRead;
  const u64 slba = is_transfer ? sqe_slba(sqe) : 0;
  const u64 nlb = is_transfer ? sqe_nlb(sqe) : 0;
  for (auto fault = ranges_.begin(); fault != ranges_.end(); ++fault) {
    if (fault->nsid != sqe.nsid || fault->opcode != sqe_opcode(sqe)) continue;
    const bool touches = slba < fault->slba + fault->nlb && fault->slba < slba + nlb;
    if (is_transfer && !touches) continue;
    const u32 status = fault->status;
    if (--fault->count == 0) ranges_.erase(fault);
    return status;
  }
  return kOk;
}

void WriteCache::note(u32 nsid, u8* target, u64 nbytes, bool is_durable) {
  writes_.push_back({nsid, target, std::vector<u8>(target, target + nbytes), is_durable});
  nbytes_ += nbytes;
  while (nbytes_ > kCacheNbytes && !writes_.empty()) {  // the oldest reach the medium
    nbytes_ -= writes_.front().bytes.size();
    writes_.pop_front();
  }
}

void WriteCache::flush(u32 nsid) {
  const auto is_flushed = [nsid](const Write& write) { return write.nsid == nsid; };
  writes_.erase(std::remove_if(writes_.begin(), writes_.end(), is_flushed), writes_.end());
  nbytes_ = 0;
  for (const Write& write : writes_) nbytes_ += write.bytes.size();
}

// Undoes all writes, newest first, and saves what each wrote; then redoes a random subset of them,
// whole or in part.  Durable writes are always redone.
void WriteCache::power_cut(u64 seed, u64 lba_nbytes) {
  Random random(seed);
  for (auto write = writes_.rbegin(); write != writes_.rend(); ++write) {
    std::swap_ranges(write->bytes.begin(), write->bytes.end(), write->target);
  }
  for (const Write& write : writes_) {
    const u64 fate = write.is_durable ? 0 : random.below(3);  // whole, torn, lost
    if (fate == 2) continue;
    for (u64 at = 0; at < write.bytes.size(); at += lba_nbytes) {
      if (fate == 1 && random.hits(kMillion / 2)) continue;
      std::copy_n(write.bytes.begin() + static_cast<std::ptrdiff_t>(at), lba_nbytes,
                  write.target + at);
    }
  }
  writes_.clear();
  nbytes_ = 0;
}

}  // namespace gio

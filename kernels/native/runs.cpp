// Splits runs of slices into commands, and copies page numbers.
#include "runs.h"

#include <algorithm>
#include <cerrno>

namespace gio {
namespace {

// Takes runs one after another, and writes their commands as long as there is room.
class Cutter {
 public:
  Cutter(const Cut& cut, Run* out, u64 out_max) : cut_(cut), out_(out), out_max_(out_max) {}

  static bool is_possible(const Cut& cut) {
    return cut.slice_nlb != 0 && cut.command_nlb_max != 0 && cut.command_slices_max != 0;
  }

  void add(u64 slba, u32 nsid, u64 count) {
    const u64 fitting = cut_.command_nlb_max / cut_.slice_nlb;
    const u64 step = std::max<u64>(1, std::min<u64>(fitting, cut_.command_slices_max));
    for (u64 start = 0; start < count; start += step) {
      const u64 slices = std::min(step, count - start);
      put(slba + start * cut_.slice_nlb, nsid, slices * cut_.slice_nlb, first_ + start);
    }
    first_ += count;
  }

  int64_t written() const { return static_cast<int64_t>(n_); }

 private:
  // A slice that is longer than a command is split at blocks; anything else fits.
  void put(u64 slba, u32 nsid, u64 nlb, u64 first) {
    for (u64 skip = 0; skip < nlb; skip += cut_.command_nlb_max, ++n_) {
      if (n_ >= out_max_) continue;
      const u64 length = std::min<u64>(cut_.command_nlb_max, nlb - skip);
      out_[n_] = Run{slba + skip, nsid, static_cast<u32>(length), static_cast<u32>(first),
                     static_cast<u32>(skip * cut_.lba_nbytes)};
    }
  }

  const Cut cut_;
  Run* const out_;
  const u64 out_max_;
  u64 first_ = 0;
  u64 n_ = 0;
};

}  // namespace
}  // namespace gio

int64_t gio_split_runs(const uint64_t* slba, const uint32_t* nsid, const int64_t* count, uint64_t n,
                       const gio::Cut* cut, gio::Run* out, uint64_t out_max) {
  if (!gio::Cutter::is_possible(*cut)) return -EINVAL;
  gio::Cutter cutter(*cut, out, out_max);
  for (uint64_t i = 0; i < n; ++i) {
    if (count[i] > 0) cutter.add(slba[i], nsid[i], static_cast<uint64_t>(count[i]));
  }
  return cutter.written();
}

int64_t gio_slot_runs(const int64_t* slots, uint64_t n, const gio::SlotPlaces* places,
                      const gio::Cut* cut, gio::Run* out, uint64_t out_max) {
  if (!gio::Cutter::is_possible(*cut) || places->group_slots == 0) return -EINVAL;
  const auto end = static_cast<int64_t>(places->members * places->member_slots);
  gio::Cutter cutter(*cut, out, out_max);
  const auto* nsids = gio::at<uint32_t>(places->nsids);
  for (uint64_t i = 0; i < n;) {
    if (slots[i] < 0 || slots[i] >= end) return -ERANGE;
    const auto slot = static_cast<uint64_t>(slots[i]);
    const uint64_t left = places->group_slots - slot % places->group_slots;
    const uint64_t room = std::min<uint64_t>(n - i, left);
    uint64_t count = 1;
    while (count < room && slots[i + count] == slots[i] + static_cast<int64_t>(count)) ++count;
    const uint64_t local = slot % places->member_slots;
    const uint64_t group = local / places->group_slots;
    const uint64_t within =
        group * places->layers * places->group_slots + local % places->group_slots;
    cutter.add(places->first_lba + within * cut->slice_nlb, nsids[slot / places->member_slots],
               count);
    i += count;
  }
  return cutter.written();
}

int64_t gio_copy_pages(const uint8_t* pages, uint32_t nbytes, uint64_t n, uint64_t most,
                       uint32_t* out) {
  bool ascends = true;
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t page = 0;
    std::copy_n(pages + i * nbytes, nbytes, reinterpret_cast<uint8_t*>(&page));
    if (page >= most) return -ERANGE;
    ascends = ascends && (i == 0 || page > out[i - 1]);
    out[i] = static_cast<uint32_t>(page);
  }
  return ascends ? 1 : 0;
}

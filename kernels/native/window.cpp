#include "window.h"

#include <algorithm>

namespace gio {

namespace {

constexpr double kNarrow = 0.98;  // of the best rate
constexpr double kWide = 0.995;
constexpr u32 kMemory = 16;        // comparisons that an average is over
constexpr u32 kFirst = 4;          // comparisons that follow each other closely
constexpr u32 kRestLong = 16;      // samples between later ones
constexpr u64 kSampleWindows = 2;  // a sample delivers so many windows

}  // namespace

u64 Window::level_nbytes(u32 level) {
  const u64 octave = kLowestNbytes << (level / 2);
  return level % 2 == 0 ? octave : octave * 181 / 128;  // the square root of two
}

void Window::start(u64 command_nbytes) {
  while (narrow_ + 1 < kLevels && level_nbytes(narrow_) < 4 * command_nbytes) ++narrow_;
  wide_ = lowest_ = highest_ = base_ = narrow_;
}

u64 Window::nbytes(bool is_due) const {
  const bool is_probing = phase_ == kProbe && base(is_due) == base_;
  return level_nbytes(is_probing ? probe_ : base(is_due));
}

void Window::delivered(u64 now_ns, u64 nbytes, bool is_due) {
  if (base(is_due) != base_) {
    base_ = base(is_due);
    phase_ = kBefore;
    interrupt();
  }
  if (is_settling_) {  // what was issued under another window does not count
    if (left_ == 0) left_ = this->nbytes(is_due);
    left_ -= std::min(left_, nbytes);
    is_settling_ = left_ != 0;
    begin_ns_ = now_ns;
    sample_nbytes_ = 0;
    return;
  }
  sample_nbytes_ += nbytes;
  if (sample_nbytes_ < kSampleWindows * this->nbytes(is_due) || now_ns == begin_ns_) return;
  const double rate =
      static_cast<double>(sample_nbytes_) * 1e9 / static_cast<double>(now_ns - begin_ns_);
  rate_ = static_cast<u64>(rate);
  ++samples_;
  begin_ns_ = now_ns;
  sample_nbytes_ = 0;
  const u64 window = this->nbytes(is_due);
  sampled(rate);
  if (this->nbytes(is_due) != window) interrupt();
}

// Before, probe, after: one comparison, and then a rest.
void Window::sampled(double rate) {
  switch (phase_) {
    case kRest:
      if (rest_ != 0 && --rest_ != 0) return;
      phase_ = kBefore;
      return;
    case kBefore:
      before_ = rate;
      choose_probe();
      phase_ = kProbe;
      return;
    case kProbe:
      probed_ = rate;
      phase_ = kAfter;
      return;
    case kAfter:
      phase_ = kRest;
      learn(2 * probed_ / (before_ + rate));
      return;
  }
}

void Window::choose_probe() {
  goes_up_ = base_ == 0 || (!goes_up_ && base_ + 1 < kLevels);
  probe_ = goes_up_ ? base_ + 1 : base_ - 1;
}

void Window::learn(double ratio) {
  const u32 lower = std::min(base_, probe_);
  const double gain = std::clamp(probe_ > base_ ? ratio : 1 / ratio, 0.5, 2.0);
  learned_[lower] = std::min(learned_[lower] + 1, kMemory);
  gain_[lower] += (gain - gain_[lower]) / learned_[lower];
  rest_ = learned_[lower] < kFirst ? 0 : kRestLong;
  lowest_ = std::min(lowest_, lower);
  highest_ = std::max(highest_, lower + 1);
  choose_levels();
}

void Window::choose_levels() {
  double curve[kLevels] = {};
  double best = curve[lowest_] = 1;
  for (u32 level = lowest_; level < highest_; ++level) {
    curve[level + 1] = curve[level] * gain_[level];
    best = std::max(best, curve[level + 1]);
  }
  const auto first = [&](double share) {
    u32 level = lowest_;
    while (curve[level] < share * best) ++level;  // bounded by the best one
    return level;
  };
  narrow_ = first(kNarrow);
  wide_ = first(kWide);
}

}  // namespace gio

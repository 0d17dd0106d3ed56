#include "window.h"

#include <algorithm>

namespace gio {

namespace {

constexpr u32 kMemory = 16;   // comparisons that an average is over
constexpr u32 kStart = 32;    // commands: so many that only an unusual drive wants more
constexpr u32 kRestLong = 8;  // samples between later ones

}  // namespace

u64 Window::level_nbytes(u32 level) {
  const u64 octave = kLowestNbytes << (level / 2);
  return level % 2 == 0 ? octave : octave * 181 / 128;  // the square root of two
}

void Window::start(u64 command_nbytes, u64 most_nbytes, double share) {
  share_ = share;
  while (floor_ + 1 < kLevels && level_nbytes(floor_) < kFloorCommands * command_nbytes) ++floor_;
  const u64 nbytes = std::min(kStart * command_nbytes, most_nbytes);
  base_ = floor_;
  while (base_ + 1 < kLevels && level_nbytes(base_) < nbytes) ++base_;
  lowest_ = highest_ = base_;
}

void Window::delivered(u64 now_ns, u64 nbytes) {
  if (is_settling_) {  // what was issued under another window does not count
    if (left_ == 0) left_ = this->nbytes() / settle_;
    left_ -= std::min(left_, nbytes);
    is_settling_ = left_ != 0;
    settle_ = kResume;
    last_ns_ = now_ns;
    is_counted_ = false;
    return;
  }
  if (now_ns == last_ns_) {  // ended together with others: counted if they are
    if (is_counted_) sample_nbytes_ += nbytes;
    return;
  }
  if (sample_nbytes_ >= this->nbytes() && !end_sample()) return;
  sample_nbytes_ += nbytes;
  sample_ns_ += now_ns - last_ns_;
  last_ns_ = now_ns;
  is_counted_ = true;
}

// Evaluates a sample; false if the window was changed.
bool Window::end_sample() {
  const u64 window = nbytes();
  const double rate = static_cast<double>(sample_nbytes_) * 1e9 / static_cast<double>(sample_ns_);
  rate_ = static_cast<u64>(rate);
  ++samples_;
  sample_nbytes_ = sample_ns_ = 0;
  sampled(rate);
  if (nbytes() == window) return true;
  start_sample();
  return false;
}

void Window::start_sample() {
  interrupt();
  settle_ = 1;
  sample_nbytes_ = sample_ns_ = 0;
}

// One comparison has three samples (before, probe, after), and is followed by a rest.
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
  goes_up_ = base_ == floor_ || (!is_new_below() && !goes_up_ && base_ + 1 < kLevels);
  probe_ = goes_up_ ? base_ + 1 : base_ - 1;
}

void Window::learn(double ratio) {
  const u32 lower = std::min(base_, probe_);
  const double gain = std::clamp(probe_ > base_ ? ratio : 1 / ratio, 0.5, 2.0);
  learned_[lower] = std::min(learned_[lower] + 1, kMemory);
  gain_[lower] += (gain - gain_[lower]) / learned_[lower];
  if (learned_[lower] >= kFirst) {  // one comparison may have met anything
    lowest_ = std::min(lowest_, lower);
    highest_ = std::max(highest_, lower + 1);
  }
  choose_base();
  rest_ = is_new_below() ? 0 : kRestLong;
}

// Selects the lowest level that reaches the share of the best rate.
void Window::choose_base() {
  double curve[kLevels] = {};
  double best = curve[lowest_] = 1;
  for (u32 level = lowest_; level < highest_; ++level) {
    curve[level + 1] = curve[level] * gain_[level];
    best = std::max(best, curve[level + 1]);
  }
  base_ = lowest_;
  while (curve[base_] < share_ * best) ++base_;  // bounded by the best one
}

u32 layers_at_once(u32 left, u64 busy_ns, u64 layer_ns, u64 pause_ns, u64 pace_ns) {
  const double layer = static_cast<double>(std::max<u64>(layer_ns, 1));
  const double pause = static_cast<double>(pause_ns), pace = static_cast<double>(pace_ns);
  const double in_time = (static_cast<double>(busy_ns) - pause) / layer;
  for (u32 layers = 1; layers < left; ++layers) {
    double covered = layers, group = layers;
    while (covered < left && group >= 1) {  // bounded: each group has a layer
      group = (group * pace - pause) / layer;
      covered += group;
    }
    if (layers + 1 > in_time && covered >= left) return layers;
  }
  return left;
}

}  // namespace gio

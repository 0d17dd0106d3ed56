// The limit of bytes in flight on one drive: as small as full bandwidth allows.
//
// Too few leave the drive idle; too many spread its bandwidth over layers that are not waited for
// yet. Windows are levels, each 1.41 times the one below.  While there is more to issue than fits,
// the delivery rate of a neighbouring level is compared with the rates of the level in use just
// before and after, so that a drift of the drive's speed cancels out.  The ratios of neighbouring
// levels give a service curve; the narrow window is its lowest level within 2 % of the best rate,
// the wide window is the lowest one within half a percent.
#pragma once

#include "gio_uring/atomics.h"

namespace gio {

constexpr u32 kFloorCommands = 2;  // in flight, of any size, whatever the window

class Window {
 public:
  // command_nbytes: size of its commands; it starts with 32 of them, but at most most_nbytes.
  // share: the share of the best rate that it must reach.
  void start(u64 command_nbytes, u64 most_nbytes, double share);

  u64 nbytes() const { return level_nbytes(phase_ == kProbe ? probe_ : base_); }
  // Counts `nbytes` of commands that ended while the window was full.
  void delivered(u64 now_ns, u64 nbytes);
  // Pauses the measurement, as the window is not full any more; it continues when it is full.
  void interrupt() { is_settling_ = true, left_ = 0; }
  u64 rate() const { return rate_; }  // bytes per second, of the last sample; 0 before it
  u64 samples() const { return samples_; }

 private:
  static constexpr u32 kLevels = 19;
  static constexpr u64 kResume = 4;
  static constexpr u32 kFirst = 3;  // comparisons that follow each other, before a level is used
  static constexpr u64 kLowestNbytes = 128 << 10;
  enum Phase { kBefore, kProbe, kAfter, kRest };

  static u64 level_nbytes(u32 level);
  bool end_sample();
  void start_sample();
  void sampled(double rate);
  bool is_new_below() const { return base_ != floor_ && learned_[base_ - 1] < kFirst; }
  void choose_probe();
  void learn(double ratio);
  void choose_base();

  double share_ = 0;
  u32 floor_ = 0;   // the level that takes no more commands than are in flight in any case
  u32 lowest_ = 0;  // of the levels with a place on the curve
  u32 highest_ = 0;
  double gain_[kLevels] = {};  // rate of the level above over the rate of this one
  u32 learned_[kLevels] = {};  // from so many comparisons
  Phase phase_ = kBefore;
  u32 base_ = 0;   // the level that is in use,
  u32 probe_ = 0;  // and its neighbour
  bool goes_up_ = true;
  u32 rest_ = 0;  // samples until the next comparison
  double before_ = 0;
  double probed_ = 0;

  bool is_settling_ = true;
  u64 left_ = 0;    // bytes until the sample begins or goes on:
  u64 settle_ = 1;  // a window, or this part of one where the window has not changed
  u64 last_ns_ = 0;
  bool is_counted_ = false;  // what was delivered then
  u64 sample_nbytes_ = 0;    // delivered while the window was full, over several transfers
  u64 sample_ns_ = 0;
  u64 rate_ = 0;
  u64 samples_ = 0;
};

// For a drive that reports commands only when all in flight have ended: each group of layers costs
// pause_ns; a layer takes the drive layer_ns and the consumer pace_ns.  Returns how many of the
// `left` layers to issue together: as many as arrive in the busy_ns for which the consumer has
// other layers, or the fewest with which each group arrives while the consumer uses the one before.
u32 layers_at_once(u32 left, u64 busy_ns, u64 layer_ns, u64 pause_ns, u64 pace_ns);

}  // namespace gio

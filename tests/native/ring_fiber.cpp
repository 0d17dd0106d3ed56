// The ring under seeded fibers, one case a line:
//
//   DEPTH SUBMITTERS COMMANDS SEED VARIANT LAPS  ->  FAULT STEPS COMMANDS
//
// where the second COMMANDS is how many all submitters did together.
//
// ring_fiber [WEIGHT_BITS [BURST_MAX]]: a fiber is drawn up to 2^(WEIGHT_BITS - 1) times as often
// as another, and makes 1 to BURST_MAX shared accesses before the next draw. A case in which
// nothing is submitted or completed for kIdleStepsMax steps is a hang.
#include <cstdio>
#include <cstdlib>

#include "ring_harness.h"

namespace {

constexpr ring::u64 kIdleStepsMax = 50000;
// Weights up to 1024 let a fiber stand still while the others make whole rounds.
ring::u32 weight_bits = 11, burst_max = 1;

struct Outcome {
  int fault;
  ring::u64 steps;
  ring::u32 commands;
};

template <typename CqDoorbell>
Outcome run(const ring::Case& the_case) {
  ring::World world(the_case);
  fiber::Scheduler scheduler(the_case.seed, burst_max);
  fiber::Random weights(~the_case.seed);
  scheduler.spawn(
      [&] {
        ring::CheckingController controller(&world);
        while (controller.completed() < world.total() && world.fault() == ring::kNone) {
          if (controller.step()) scheduler.progress();
          fiber::switch_point();
        }
      },
      1u << weights.below(weight_bits));
  for (ring::u32 id = 0; id < the_case.submitters; ++id) {
    scheduler.spawn(
        [&, id] {
          ring::Submitter<gio::WordDoorbell, CqDoorbell> submitter(&world, id);
          while (!submitter.finished() && world.fault() == ring::kNone) {
            if (submitter.step()) scheduler.progress();
            fiber::switch_point();
          }
        },
        1u << weights.below(weight_bits));
  }
  if (!scheduler.run(kIdleStepsMax)) world.report(ring::kStalled);
  ring::LateDoorbell::held().clear();
  return {world.fault(), scheduler.steps(), world.total()};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) weight_bits = static_cast<ring::u32>(std::atoi(argv[1]));
  if (argc > 2) burst_max = static_cast<ring::u32>(std::atoi(argv[2]));
  if (weight_bits < 1 || weight_bits > 16 || burst_max < 1 || burst_max > 4096) return 64;
  ring::Case c;
  unsigned variant;
  while (std::scanf("%u %u %u %llu %u %u", &c.depth, &c.submitters, &c.commands, &c.seed, &variant,
                    &c.laps) == 6) {  // bounded by the input
    c.variant = static_cast<ring::Variant>(variant);
    const Outcome outcome =
        c.variant == ring::kLateCqDoorbell ? run<ring::LateDoorbell>(c) : run<gio::WordDoorbell>(c);
    std::printf("%d %llu %u\n", outcome.fault, static_cast<unsigned long long>(outcome.steps),
                outcome.commands);
    std::fflush(stdout);
  }
  return 0;
}

// The ring under real threads: for TSan, and for ASan with UBSan.
//
//   ring_stress DEPTH SUBMITTERS COMMANDS SEED VARIANT LAPS
//
// Prints and exits with the ring::Fault that was found; TSan's own exit status is set by its
// options.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "ring_harness.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kDeadline = std::chrono::seconds(60);

template <typename Doorbell>
void submit_all(ring::World* world, ring::u32 id) {
  ring::Submitter<Doorbell, Doorbell> submitter(world, id);
  const auto deadline = Clock::now() + kDeadline;
  while (!submitter.finished() && world->fault() == ring::kNone) {
    if (submitter.step()) continue;
    std::this_thread::yield();
    if (Clock::now() > deadline) world->report(ring::kStalled);
  }
}

void control(ring::World* world) {
  ring::CheckingController controller(world);
  const auto deadline = Clock::now() + kDeadline;
  while (controller.completed() < world->total() && world->fault() == ring::kNone) {
    if (controller.step()) continue;
    std::this_thread::yield();
    if (Clock::now() > deadline) world->report(ring::kStalled);
  }
}

template <typename Doorbell>
int run(const ring::Case& the_case) {
  ring::World world(the_case);
  std::vector<std::thread> threads;
  threads.emplace_back(control, &world);
  for (ring::u32 id = 0; id < the_case.submitters; ++id) {
    threads.emplace_back(submit_all<Doorbell>, &world, id);
  }
  for (auto& thread : threads) thread.join();
  std::printf("commands %u fault %d\n", world.total(), world.fault());
  return world.fault();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: ring_stress DEPTH SUBMITTERS COMMANDS SEED VARIANT LAPS\n");
    return 64;
  }
  const auto number = [&](int i) { return static_cast<ring::u32>(std::atoll(argv[i])); };
  const ring::Case the_case = {number(1),
                               number(2),
                               number(3),
                               static_cast<ring::u64>(std::atoll(argv[4])),
                               static_cast<ring::Variant>(number(5)),
                               number(6)};
  return the_case.variant == ring::kRelaxedDoorbell ? run<ring::RelaxedDoorbell>(the_case)
                                                    : run<gio::WordDoorbell>(the_case);
}

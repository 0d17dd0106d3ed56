// Seeded fibers: every interleaving of the ring headers' shared accesses, on one thread.
//
// Defines GIO_SCHED_POINT, so it comes before any gio_uring header.  A switch point stands before
// every shared access; which fiber goes on is drawn from the seed, so a case replays exactly.
// What this shows are sequentially consistent interleavings; weaker orders are for TSan.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace fiber {

// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) % n); }

 private:
  uint64_t state_;
};

// Weights of fibers, of which one is drawn: the number whose share of the line a ticket falls into.
// A binary indexed tree (Fenwick: A New Data Structure for Cumulative Frequency Tables, 1994).
class Lottery {
 public:
  void resize(size_t n) {
    half_ = 1;
    while (half_ * 2 <= n) half_ *= 2;
    weights_.assign(n, 0);
    sums_.assign(n + 1, 0);
    total_ = 0;
  }

  void set(size_t at, uint32_t weight) {
    const uint32_t more = weight - weights_[at];  // modulo 2^32, as the sums
    weights_[at] = weight;
    total_ += more;
    for (size_t i = at + 1; i < sums_.size(); i += i & -i) sums_[i] += more;
  }

  uint32_t total() const { return total_; }

  size_t find(uint32_t ticket) const {
    size_t at = 0;
    for (size_t step = half_; step != 0; step /= 2) {
      if (at + step >= sums_.size() || sums_[at + step] > ticket) continue;
      at += step;
      ticket -= sums_[at];
    }
    return at;
  }

 private:
  std::vector<uint32_t> weights_, sums_;
  uint32_t total_ = 0;
  size_t half_ = 1;
};

// Thrown into fibers that are given up, so that what lives on their stacks is destroyed.
struct Stopped {};

class Scheduler {
 public:
  explicit Scheduler(uint64_t seed) : random_(seed) {}
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Adds a fiber before run().  A fiber of weight w is chosen w times as often as one of weight 1;
  // unequal weights are what makes one fiber stand still while others make many rounds.
  size_t spawn(std::function<void()> body, uint32_t weight = 1, void* local = nullptr) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack.reset(new char[kStackNbytes]);
    fiber->body = std::move(body);
    fiber->weight = weight;
    fiber->local = local;
    fibers_.push_back(std::move(fiber));
    return fibers_.size() - 1;
  }

  // Runs until every fiber returned.  False when that cannot happen: all that are left are
  // parked, or no fiber called progress() for idle_steps_max switch points, and then not for as
  // many again with equal weights: a fiber that is merely slow is not a hang.
  bool run(uint64_t idle_steps_max) {
    Scheduler* outer = std::exchange(active(), this);
    progress_at_ = steps_;
    idle_steps_max_ = idle_steps_max;
    lottery_.resize(fibers_.size());
    for (size_t i = 0; i < fibers_.size(); ++i) update(i);
    bool finished = false;
    for (uint64_t at = choose(); at != kNoFiber; at = choose()) {  // bounded by idle_steps_max
      if (steps_ - progress_at_ > idle_steps_max) {
        if (fair_) break;
        fair_ = true;
        for (size_t i = 0; i < fibers_.size(); ++i) update(i);
        progress();
      }
      ++steps_;
      enter(at);
    }
    finished = alive() == 0;
    stopping_ = true;
    for (size_t i = 0; i < fibers_.size(); ++i) {
      if (fibers_[i]->started && !fibers_[i]->done) enter(i);
    }
    active() = outer;
    return finished;
  }

  // A switch point.
  void pause() {
    if (stopping_) {
      if (std::uncaught_exceptions() == 0) throw Stopped();
      return;
    }
    const size_t next = choose();
    if (next == self_) {
      ++steps_;
      return;
    }
    if (!go(next)) {
      next_ = next;
      leave();
    }
    if (stopping_) throw Stopped();
  }

  // Leaves the set of runnable fibers until another fiber calls unpark.
  void park() {
    fibers_[self_]->parked = true;
    update(self_);
    leave();
    if (stopping_) throw Stopped();
  }
  void unpark(size_t fiber) {
    fibers_[fiber]->parked = false;
    update(fiber);
  }

  void progress() { progress_at_ = steps_; }
  size_t self() const { return self_; }
  void* local() const { return fibers_[self_]->local; }
  uint64_t steps() const { return steps_; }
  bool inside() const { return self_ != kNoFiber; }

  static Scheduler*& active() {
    static thread_local Scheduler* scheduler = nullptr;  // threads have fibers of their own
    return scheduler;
  }

 private:
  static constexpr size_t kStackNbytes = 128 * 1024;
  static constexpr size_t kNoFiber = ~static_cast<size_t>(0);

  // Where a fiber goes on.  swapcontext saves the signal mask too, by a system call each time, so
  // that only a fiber's first entry uses it; AddressSanitizer does not follow a longjmp.
  struct Context {
    ucontext_t whole;
    jmp_buf place;
    bool jumps = false;
  };

  static void change(Context* from, Context* to) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    swapcontext(&from->whole, &to->whole);
#else
    from->jumps = true;
    if (_setjmp(from->place) != 0) return;
    if (to->jumps) _longjmp(to->place, 1);
    setcontext(&to->whole);
#endif
  }

  struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
    uint32_t weight = 1;
    void* local = nullptr;
    void* fake_stack = nullptr;
    bool started = false, parked = false, done = false;
  };

  size_t alive() const {
    size_t n = 0;
    for (const auto& fiber : fibers_) n += !fiber->done;
    return n;
  }

  // Straight to another fiber, which spares the way over run(); false where run() has to look.
  bool go([[maybe_unused]] size_t next) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    Fiber& from = *fibers_[self_];
    Fiber& to = *fibers_[next];
    if (!to.started || steps_ - progress_at_ > idle_steps_max_) return false;
    ++steps_;
    self_ = next;
    change(&from.context, &to.context);
    return true;
#endif
  }

  // The fiber that pause() drew, else a new draw; kNoFiber when no fiber can run.
  size_t choose() {
    if (next_ != kNoFiber) return std::exchange(next_, kNoFiber);
    if (lottery_.total() == 0) return kNoFiber;
    return lottery_.find(random_.below(lottery_.total()));
  }

  // A fiber that may have become runnable, or no longer is.
  void update(size_t at) {
    const Fiber& fiber = *fibers_[at];
    const bool is_runnable = !fiber.done && !fiber.parked;
    lottery_.set(at, is_runnable ? (fair_ ? 1 : fiber.weight) : 0);
  }

  void enter(size_t at) {
    Fiber& fiber = *fibers_[at];
    self_ = at;
    if (!fiber.started) {
      fiber.started = true;
      ucontext_t* context = &fiber.context.whole;
      getcontext(context);
      context->uc_stack.ss_sp = fiber.stack.get();
      context->uc_stack.ss_size = kStackNbytes;
      context->uc_link = nullptr;
      makecontext(context, &Scheduler::trampoline, 0);
    }
    announce_switch(&main_fake_stack_, fiber.stack.get(), kStackNbytes);
    change(&main_, &fiber.context);
    finish_switch(main_fake_stack_, nullptr, nullptr);
    self_ = kNoFiber;
  }

  void leave() {
    Fiber& fiber = *fibers_[self_];
    announce_switch(fiber.done ? nullptr : &fiber.fake_stack, main_stack_, main_stack_nbytes_);
    change(&fiber.context, &main_);
    finish_switch(fiber.fake_stack, nullptr, nullptr);
  }

  static void trampoline() {
    Scheduler* scheduler = active();
    finish_switch(nullptr, &scheduler->main_stack_, &scheduler->main_stack_nbytes_);
    Fiber& fiber = *scheduler->fibers_[scheduler->self_];
    try {
      fiber.body();
    } catch (const Stopped&) {
    }
    fiber.done = true;
    scheduler->update(scheduler->self_);
    scheduler->leave();
  }

  // AddressSanitizer must know which stack is in use.
  static void announce_switch([[maybe_unused]] void** fake_stack,
                              [[maybe_unused]] const void* stack, [[maybe_unused]] size_t nbytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake_stack, stack, nbytes);
#endif
  }
  static void finish_switch([[maybe_unused]] void* fake_stack,
                            [[maybe_unused]] const void** old_stack,
                            [[maybe_unused]] size_t* old_nbytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, old_stack, old_nbytes);
#endif
  }

  Random random_;
  Lottery lottery_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Context main_;
  void* main_fake_stack_ = nullptr;
  const void* main_stack_ = nullptr;
  size_t main_stack_nbytes_ = 0;
  size_t self_ = kNoFiber;
  size_t next_ = kNoFiber;
  uint64_t steps_ = 0;
  uint64_t progress_at_ = 0;
  uint64_t idle_steps_max_ = 0;
  bool stopping_ = false;
  bool fair_ = false;
};

// Where a fiber may be switched; nothing outside of a scheduler's run().
inline void switch_point() {
  Scheduler* scheduler = Scheduler::active();
  if (scheduler != nullptr && scheduler->inside()) scheduler->pause();
}

}  // namespace fiber

#define GIO_SCHED_POINT() ::fiber::switch_point()

// Seeded fibers: every interleaving of the ring headers' shared accesses, on one thread.
//
// Defines GIO_SCHED_POINT, so it comes before any gio_uring header.  A switch point stands before
// every shared access; which fiber goes on is drawn from the seed, so a case replays exactly.
// What this shows are sequentially consistent interleavings; weaker orders are for TSan.
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <array>
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
  // The upper half of a draw as a fraction of 2^32, times n: a division less.
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(((next() >> 32) * n) >> 32); }

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
    sums_.resize(half_ * 2, ~0u);  // no ticket reaches these
    total_ = 0;
  }

  void set(size_t at, uint32_t weight) {
    const uint32_t more = weight - weights_[at];  // modulo 2^32, as the sums
    weights_[at] = weight;
    total_ += more;
    for (size_t i = at + 1; i <= weights_.size(); i += i & -i) sums_[i] += more;
  }

  uint32_t total() const { return total_; }

  size_t find(uint32_t ticket) const {
    size_t at = 0;
    for (size_t step = half_; step != 0; step /= 2) {  // no branches: they would be drawn as well
      const uint32_t sum = sums_[at + step];
      const uint32_t beyond = 0u - (sum <= ticket);
      at += step & beyond;
      ticket -= sum & beyond;
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
  // burst_max: a fiber that is drawn passes 1 to this many switch points before the next draw.
  explicit Scheduler(uint64_t seed, uint32_t burst_max = 1)
      : random_(seed), burst_max_(burst_max) {}
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
    stay_ = 0;
    for (size_t i = 0; i < fibers_.size(); ++i) {
      if (fibers_[i]->started && !fibers_[i]->done) enter(i);
    }
    active() = outer;
    return finished;
  }

  // A switch point.
  void pause() {
    if (stay_ == 0) return draw_and_switch();
    --stay_;
    ++steps_;
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
  static constexpr size_t kDrawnMax = 63;

  // Where a fiber goes on.  swapcontext saves the signal mask too, by a system call each time.
#if defined(__x86_64__)
  struct Context {
    void* stack = nullptr;  // on it: where to go on, rbx and rbp
  };

  static void change(Context* from, const Context* to) {
    void* stack = to->stack;
    asm volatile(
        "lea -128(%%rsp), %%rsp\n"  // the red zone is the compiler's
        "push %%rbp\n"
        "push %%rbx\n"
        "lea 1f(%%rip), %%rax\n"
        "push %%rax\n"
        "mov %%rsp, (%0)\n"
        "mov %1, %%rsp\n"
        "pop %%rax\n"
        "jmp *%%rax\n"
        "1: pop %%rbx\n"
        "pop %%rbp\n"
        "lea 128(%%rsp), %%rsp\n"
        : "+D"(from), "+S"(stack)
        :
        : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1",
          "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
          "xmm13", "xmm14", "xmm15", "cc", "memory");
  }

  // A function is entered with the stack 8 bytes off a multiple of 16.
  static void prepare(Context* context, char* stack) {
    const uintptr_t top = reinterpret_cast<uintptr_t>(stack + kStackNbytes) & ~uintptr_t{15};
    context->stack = reinterpret_cast<void*>(top - 16);
    *static_cast<void (**)()>(context->stack) = &Scheduler::trampoline;
  }
#else
  struct Context {
    ucontext_t whole;
  };

  static void change(Context* from, const Context* to) { swapcontext(&from->whole, &to->whole); }

  static void prepare(Context* context, char* stack) {
    getcontext(&context->whole);
    context->whole.uc_stack.ss_sp = stack;
    context->whole.uc_stack.ss_size = kStackNbytes;
    context->whole.uc_link = nullptr;
    makecontext(&context->whole, &Scheduler::trampoline, 0);
  }
#endif

  struct Drawn {
    size_t fiber;
    uint32_t stay;
  };

  struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
    uint32_t weight = 1;
    void* local = nullptr;
    void* fake_stack = nullptr;
    bool started = false, parked = false, done = false;
  };

  __attribute__((noinline)) void draw_and_switch() {
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

  size_t alive() const {
    size_t n = 0;
    for (const auto& fiber : fibers_) n += !fiber->done;
    return n;
  }

  // Straight to another fiber, which spares the way over run(); false where run() has to look.
  bool go(size_t next) {
    Fiber& from = *fibers_[self_];
    Fiber& to = *fibers_[next];
    if (!to.started || steps_ - progress_at_ > idle_steps_max_) return false;
    ++steps_;
    self_ = next;
    announce_switch(&from.fake_stack, to.stack.get(), kStackNbytes);
    change(&from.context, &to.context);
    finish_switch(from.fake_stack, nullptr, nullptr);
    return true;
  }

  // The fiber that pause() drew, else a new draw; kNoFiber when no fiber can run.
  size_t choose() {
    if (next_ != kNoFiber) return std::exchange(next_, kNoFiber);
    if (drawn_at_ == drawn_n_ && !draw()) return kNoFiber;
    const Drawn& drawn = drawn_[drawn_at_++];
    stay_ = drawn.stay;
    return drawn.fiber;
  }

  // Draws ahead, as a processor works on many draws at a time, but not on the next fiber before
  // its draw; few draws where fibers park often, as each makes the rest of them void.
  bool draw() {
    if (lottery_.total() == 0) return false;
    drawn_n_ = drawn_n_ < kDrawnMax ? drawn_n_ * 2 + 1 : kDrawnMax;
    for (size_t i = 0; i < drawn_n_; ++i) {
      const size_t fiber = lottery_.find(random_.below(lottery_.total()));
      drawn_[i] = {fiber, burst_max_ > 1 ? random_.below(burst_max_) : 0};
    }
    drawn_at_ = 0;
    return true;
  }

  // A fiber that may have become runnable, or no longer is.
  void update(size_t at) {
    drawn_at_ = drawn_n_ = 0;
    const Fiber& fiber = *fibers_[at];
    const bool is_runnable = !fiber.done && !fiber.parked;
    lottery_.set(at, is_runnable ? (fair_ ? 1 : fiber.weight) : 0);
  }

  void enter(size_t at) {
    Fiber& fiber = *fibers_[at];
    self_ = at;
    if (!fiber.started) {
      fiber.started = true;
      prepare(&fiber.context, fiber.stack.get());
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
  uint32_t burst_max_;
  uint32_t stay_ = 0;  // switch points that the fiber passes before the next draw
  std::array<Drawn, kDrawnMax> drawn_;
  size_t drawn_at_ = 0, drawn_n_ = 0;
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

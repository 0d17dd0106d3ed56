// What the stand-in of libcuda.so.1 keeps: streams that are threads with queues, and memory that is
// the host's.  Not a GPU: it shows order, addresses and bytes.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace machine {

constexpr uint64_t kPageNbytes = 4096;
// A hardware queue that is full blocks the calls of every thread.
constexpr uint64_t kWorkMax = 1024;
constexpr auto kNap = std::chrono::microseconds(50);
// Where CUDA_DEVICE_MAX_CONNECTIONS is not set.
constexpr size_t kQueues = 8;

inline size_t number_from(const char* name, size_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

// Polls.  False after the time that a call waits at most; tests of what never ends shorten it.
template <typename Condition>
bool wait_until(Condition holds) {
  static const auto most = std::chrono::milliseconds(number_from("STAND_IN_GIVE_UP_MS", 30000));
  const auto end = std::chrono::steady_clock::now() + most;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

// Held by a call that waits: every other call waits with it.
inline std::mutex& gate() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

inline void pass_gate() { const std::lock_guard<std::mutex> blocked(gate()); }

// A hardware queue.  Work of the streams that share it begins in the order in which it was put
// there: what waits is in the way of all that follows, a kernel that runs is not.
struct Queue {
  std::atomic<uint64_t> begun{0}, taken{0};

  bool is_full() const { return taken - begun >= kWorkMax; }

  static Queue* all(size_t* count) {
    static const size_t number = number_from("CUDA_DEVICE_MAX_CONNECTIONS", kQueues);
    static Queue* queues = new Queue[number];
    *count = number;
    return queues;
  }

  // Of the next stream, by turns.
  static Queue* next() {
    static std::atomic<size_t> turn{0};
    size_t count;
    Queue* queues = all(&count);
    return queues + turn++ % count;
  }

  // Waits until all that is in the queues by now has begun.
  static bool drain() {
    size_t count;
    Queue* queues = all(&count);
    for (size_t i = 0; i < count; ++i) {
      const uint64_t last = queues[i].taken;
      if (!wait_until([&] { return queues[i].begun >= last; })) return false;
    }
    return true;
  }
};

// Work that is done in order by a thread of its own, which ends with the last work.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Step = std::function<bool()>;  // called until it returns true

  // green: the handle of the green context that it belongs to, or 0.
  static std::shared_ptr<Stream> start(uint64_t green) {
    auto stream = std::make_shared<Stream>();
    stream->green_ = green;
    std::thread([stream] { stream->work(); }).detach();
    return stream;
  }

  // The number of the work, counted from 1; 0 when there came no room for it.  A kernel leaves its
  // hardware queue as it begins.
  uint64_t put(Step step, bool is_kernel) {
    const std::lock_guard<std::mutex> blocked(gate());
    if (!wait_until([&] { return !queue_->is_full(); })) return 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    steps_.push_back({std::move(step), queue_->taken++, is_kernel});
    changed_.notify_all();
    return ++added_;
  }

  bool is_past(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= number;
  }

  // Whether all that is on it by now has ended.
  bool is_done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return steps_.empty();
  }

  // Waits for all that is on it by now.
  bool settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t last = added_;
    lock.unlock();
    return wait_until([&] { return is_past(last); });
  }

  // It ends once its work has.
  void end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }

  uint64_t green() const { return green_; }

 private:
  struct Work {
    Step step;
    uint64_t turn;  // in its hardware queue
    bool is_kernel;
  };

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_ending_ || !steps_.empty()) {  // until the stream is destroyed, or the process ends
      if (steps_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const Work& next = steps_.front();  // others only append
      lock.unlock();
      bool is_over = false;
      if (queue_->begun == next.turn) {
        if (next.is_kernel) ++queue_->begun;
        is_over = next.step();
      }
      if (!is_over) std::this_thread::sleep_for(kNap);
      lock.lock();
      if (!is_over) continue;
      if (!next.is_kernel) ++queue_->begun;
      steps_.pop_front();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> steps_;
  Queue* const queue_ = Queue::next();
  uint64_t added_ = 0, done_ = 0, green_ = 0;
  bool is_ending_ = false;
};

inline std::atomic<uint64_t>& last_handle() {
  static std::atomic<uint64_t> last{0xcada0000};
  return last;
}

// Objects by handles, which are never used twice, so that none is taken for another.
template <typename T>
class Handles {
 public:
  template <typename Handle>
  Handle add(std::shared_ptr<T> object) {
    const uint64_t handle = last_handle() += 0x10;
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_[handle] = std::move(object);
    return reinterpret_cast<Handle>(handle);
  }

  std::shared_ptr<T> find(const void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<uint64_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<T> take(const void* handle) {
    std::shared_ptr<T> object = find(handle);
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_.erase(reinterpret_cast<uint64_t>(handle));
    return object;
  }

  std::map<uint64_t, std::shared_ptr<T>> all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return objects_;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<T>> objects_;
};

// What the device reaches: its own memory, and host memory that was registered.
class Memory {
 public:
  enum class Kind { kDevice, kHost };
  static constexpr size_t kAlignment = 256, kFilledNbytes = 16 << 20;

  // Memory that ends at a page without access rights, aligned as the driver's own.
  uint64_t allocate(size_t nbytes) {
    const size_t used = rounded(nbytes, kAlignment), whole = rounded(used, kPageNbytes);
    void* place = mmap(nullptr, whole + kPageNbytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return 0;
    mprotect(static_cast<char*>(place) + whole, kPageNbytes, PROT_NONE);
    const uint64_t address = reinterpret_cast<uint64_t>(place) + whole - used;
    // The device's is not cleared either; what is large is left alone, for the time it takes.
    std::memset(reinterpret_cast<void*>(address), 0xa5, std::min(nbytes, kFilledNbytes));
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_[address] = {nbytes, Kind::kDevice};
    return address;
  }

  bool free(uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ranges_.find(address);
    if (found == ranges_.end() || found->second.kind != Kind::kDevice) return false;
    const uint64_t end = address + rounded(found->second.nbytes, kAlignment) + kPageNbytes;
    const uint64_t start = address / kPageNbytes * kPageNbytes;
    munmap(reinterpret_cast<void*>(start), end - start);
    ranges_.erase(found);
    return true;
  }

  // False when a page of it is known already.
  bool pin(uint64_t address, size_t nbytes) {
    const uint64_t first = address / kPageNbytes, last = (address + nbytes - 1) / kPageNbytes;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [start, range] : ranges_) {
      if (start / kPageNbytes <= last && first <= (start + range.nbytes - 1) / kPageNbytes) {
        return false;
      }
    }
    ranges_[address] = {nbytes, Kind::kHost};
    return true;
  }

  bool unpin(uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ranges_.find(address);
    if (found == ranges_.end() || found->second.kind != Kind::kHost) return false;
    ranges_.erase(found);
    return true;
  }

  // Whether all of it lies in one allocation or registration, or in one of the device's own.
  bool holds(uint64_t address, size_t nbytes, bool is_own = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto above = ranges_.upper_bound(address);
    if (above == ranges_.begin()) return false;
    const auto& [start, range] = *--above;
    if (is_own && range.kind != Kind::kDevice) return false;
    return address + nbytes <= start + range.nbytes && address + nbytes >= address;
  }

 private:
  static size_t rounded(size_t nbytes, size_t step) { return (nbytes + step - 1) / step * step; }

  struct Range {
    size_t nbytes;
    Kind kind;
  };
  std::mutex mutex_;
  std::map<uint64_t, Range> ranges_;
};

}  // namespace machine

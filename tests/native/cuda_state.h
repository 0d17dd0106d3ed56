// What the stand-in of libcuda.so.1 knows of its one device, and what every call checks first.
#pragma once

#include <elf.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include "cuda_machine.h"

namespace machine {

constexpr int kVersion = 13000;
constexpr CUdevice kDevice = 0;
const std::string kPciAddress = "FFFF:65:00.0";  // which no machine has
constexpr unsigned kSms = 132, kSmsStep = 8;     // an H200
constexpr unsigned kBlockThreads = 1024;
constexpr unsigned char kPadding = 0x5c;  // of resources: a copy must include it

struct Event {
  std::mutex mutex;
  std::shared_ptr<Stream> stream;  // of the last record, if there was one
  uint64_t number = 0;

  bool is_done() {
    const std::lock_guard<std::mutex> lock(mutex);
    return stream == nullptr || stream->is_past(number);
  }
};

struct Module {
  std::string image;
};

struct Kernel;

struct Function {
  const Kernel* kernel;
  std::weak_ptr<Module> module;
};

struct Description {
  unsigned sms;
};

// Kernels that run, by the time at which they began.  Of a GPU with a display: one that runs longer
// than STAND_IN_WATCHDOG_MS loses the context.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  bool is_on() const { return most_.count() != 0; }

  std::multiset<Clock::time_point>::iterator begin_kernel() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return began_.insert(Clock::now());
  }

  void end_kernel(std::multiset<Clock::time_point>::iterator kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    began_.erase(kernel);
  }

  bool has_struck() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_on() && !began_.empty() && Clock::now() - *began_.begin() > most_;
  }

 private:
  const std::chrono::milliseconds most_{number_from("STAND_IN_WATCHDOG_MS", 0)};
  std::mutex mutex_;
  std::multiset<Clock::time_point> began_;
};

// All there is.  Never destroyed: streams outlive the process's own end.
struct Machine {
  std::atomic<bool> is_initialised{false};
  std::atomic<int> context_uses{0};
  std::atomic<int> error{CUDA_SUCCESS};  // of a kernel; the context is lost
  Handles<Stream> streams;
  Handles<Event> events;
  Handles<Module> modules;
  Handles<Function> functions;
  Handles<Description> descriptions;
  Handles<Description> greens;
  Memory memory;
  Watchdog watchdog;
  std::shared_ptr<Stream> default_stream = Stream::start(0);

  // What may wait for the device does, and blocks the calls of every thread meanwhile.
  CUresult settle() {
    const std::lock_guard<std::mutex> blocked(gate());
    for (const auto& [handle, stream] : streams.all()) {
      if (!stream->settle()) return CUDA_ERROR_LAUNCH_TIMEOUT;
    }
    return CUDA_SUCCESS;
  }

  // What may wait for all that is enqueued does, though not for kernels that run.
  CUresult drain() {
    const std::lock_guard<std::mutex> blocked(gate());
    return Queue::drain() ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
  }
};

inline Machine& machine_of() {
  static Machine& machine = *new Machine;
  return machine;
}

inline CUcontext primary() { return reinterpret_cast<CUcontext>(0xc0de0000ull); }

inline std::vector<CUcontext>& contexts() {
  static thread_local std::vector<CUcontext> stack;
  return stack;
}

// What every call on the context checks first.
inline CUresult enter() {
  if (!machine_of().is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (contexts().empty() || contexts().back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (machine_of().context_uses == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  pass_gate();
  if (machine_of().watchdog.has_struck()) machine_of().error = CUDA_ERROR_LAUNCH_TIMEOUT;
  return static_cast<CUresult>(machine_of().error.load());
}

inline CUresult find_stream(CUstream handle, std::shared_ptr<Stream>* stream) {
  if (const CUresult wrong = enter(); wrong != CUDA_SUCCESS) return wrong;
  *stream = handle == nullptr ? machine_of().default_stream : machine_of().streams.find(handle);
  if (*stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const auto green = reinterpret_cast<void*>((*stream)->green());
  if (green != nullptr && machine_of().greens.find(green) == nullptr) {
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  }
  return CUDA_SUCCESS;
}

// Finds the stream and puts work on it.
inline CUresult put(CUstream handle, Stream::Step step, bool is_kernel = false) {
  std::shared_ptr<Stream> stream;
  if (const CUresult wrong = find_stream(handle, &stream); wrong != CUDA_SUCCESS) return wrong;
  return stream->put(std::move(step), is_kernel) == 0 ? CUDA_ERROR_LAUNCH_TIMEOUT : CUDA_SUCCESS;
}

inline bool is_reached(CUdeviceptr address, size_t nbytes) {
  return machine_of().memory.holds(address, nbytes);
}

inline bool is_word(CUdeviceptr address) { return address % 4 == 0 && is_reached(address, 4); }

// Page faults of this thread so far; mincore knows nothing of the pages of a device.
inline uint64_t faults() {
  rusage used;
  getrusage(RUSAGE_THREAD, &used);
  return static_cast<uint64_t>(used.ru_minflt);
}

// Every page of a device's registers must be mapped: the driver looks them up and maps none.
inline bool can_be_registered(void* address, size_t nbytes, unsigned flags) {
  const unsigned known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                         CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
  if (address == nullptr || nbytes == 0 || (flags & ~known) != 0) return false;
  if ((flags & CU_MEMHOSTREGISTER_IOMEMORY) == 0) return true;
  faults();  // whose own first call may be one
  const uint64_t before = faults();
  for (size_t i = 0; i < nbytes; i += kPageNbytes) {
    *reinterpret_cast<volatile uint32_t*>(static_cast<char*>(address) + i + kPageNbytes - 4);
  }
  return faults() == before;
}

template <typename T>
T* at(CUdeviceptr address) {
  return reinterpret_cast<T*>(address);
}

// The ELF header tells how long a cubin is, and for which architecture.
inline CUresult read_cubin(const void* image, std::string* out) {
  Elf64_Ehdr head;
  std::memcpy(&head, image, sizeof head);
  if (std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_machine != EM_CUDA) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  if ((head.e_flags >> 8 & 0xff) != 90) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const size_t nbytes = std::max(head.e_shoff + size_t{head.e_shentsize} * head.e_shnum,
                                 head.e_phoff + size_t{head.e_phentsize} * head.e_phnum);
  out->assign(static_cast<const char*>(image), nbytes);
  return CUDA_SUCCESS;
}

inline CUdevResource sms_of(unsigned count) {
  CUdevResource resource;
  std::memset(&resource, kPadding, sizeof resource);
  resource.type = CU_DEV_RESOURCE_TYPE_SM;
  resource.sm = {count, kSmsStep, kSmsStep};
  return resource;
}

inline bool is_sms(const CUdevResource& resource) {
  const unsigned char* padding = resource._internal_padding;
  const auto is_right = [](unsigned char byte) { return byte == kPadding; };
  return resource.type == CU_DEV_RESOURCE_TYPE_SM && resource.sm.smCount != 0 &&
         std::all_of(padding, padding + sizeof resource._internal_padding, is_right);
}

#define NAMED(code) {code, #code}
const std::pair<CUresult, const char*> kResults[] = {
    NAMED(CUDA_SUCCESS),
    NAMED(CUDA_ERROR_INVALID_VALUE),
    NAMED(CUDA_ERROR_OUT_OF_MEMORY),
    NAMED(CUDA_ERROR_NOT_INITIALIZED),
    NAMED(CUDA_ERROR_INVALID_DEVICE),
    NAMED(CUDA_ERROR_INVALID_IMAGE),
    NAMED(CUDA_ERROR_INVALID_CONTEXT),
    NAMED(CUDA_ERROR_NO_BINARY_FOR_GPU),
    NAMED(CUDA_ERROR_INVALID_HANDLE),
    NAMED(CUDA_ERROR_NOT_FOUND),
    NAMED(CUDA_ERROR_NOT_READY),
    NAMED(CUDA_ERROR_LAUNCH_TIMEOUT),
    NAMED(CUDA_ERROR_CONTEXT_IS_DESTROYED),
    NAMED(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
    NAMED(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    NAMED(CUDA_ERROR_LAUNCH_FAILED),
    NAMED(CUDA_ERROR_NOT_SUPPORTED),
    NAMED(CUDA_ERROR_INVALID_RESOURCE_TYPE),
    NAMED(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)};

inline CUresult name_of(CUresult code, const char** name) {
  *name = nullptr;
  for (const auto& [known, its_name] : kResults) {
    if (known == code) *name = its_name;
  }
  return *name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// Returns what is wrong from an entry point.
#define CHECK(call)                                                         \
  do {                                                                      \
    if (const CUresult wrong = (call); wrong != CUDA_SUCCESS) return wrong; \
  } while (false)
#define REFUSE_IF(condition, code) CHECK((condition) ? code : CUDA_SUCCESS)

}  // namespace machine

#include "cuda_calls.h"

#include <cstddef>
#include <tuple>

namespace {

using Result = int32_t;
using Handle = void*;
using Address = unsigned long long;

constexpr int kOwnCaptures = 1;        // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr unsigned kUntilReached = 0;  // CU_STREAM_WAIT_VALUE_GEQ
constexpr uint64_t kNoContext = UINT64_MAX;

template <typename... Arguments>
Result call(void* function, std::tuple<Arguments...> arguments) {
  return std::apply(reinterpret_cast<Result (*)(Arguments...)>(function), arguments);
}

// Converts a word of a call to a driver's pointer type.
template <typename T>
T* as(uint64_t word) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(word));
}

Result make(void* function, const tutti_cuda_call& one) {
  const Handle stream = as<void>(one.stream);
  const uint64_t* o = one.operands;
  switch (one.kind) {
    case kTuttiCudaWaitValue:
      return call(function,
                  std::tuple{stream, Address{o[0]}, static_cast<uint32_t>(o[1]), kUntilReached});
    case kTuttiCudaWriteValue:
      return call(function, std::tuple{stream, Address{o[0]}, static_cast<uint32_t>(o[1]), 0U});
    case kTuttiCudaCopy:
      return call(function, std::tuple{Address{o[0]}, Address{o[1]}, size_t{o[2]}, stream});
    case kTuttiCudaCopyBatch: {
      size_t first = 0;  // the attributes are those of all copies
      return call(function,
                  std::tuple{as<Address>(o[0]), as<Address>(o[1]), as<size_t>(o[2]),
                             size_t{one.count}, as<void>(o[3]), &first, size_t{1}, stream});
    }
    case kTuttiCudaFill:
      return call(function, std::tuple{Address{o[0]}, static_cast<unsigned char>(o[1]),
                                       size_t{o[2]}, stream});
    case kTuttiCudaRecordEvent:
      return call(function, std::tuple{as<void>(o[0]), stream});
    case kTuttiCudaWaitEvent:
      return call(function, std::tuple{stream, as<void>(o[0]), 0U});
    case kTuttiCudaLaunch:
      return call(function, std::tuple{as<void>(o[0]), unsigned{one.count}, 1U, 1U,
                                       static_cast<unsigned>(o[1]), 1U, 1U, 0U, stream,
                                       as<void*>(o[2]), as<void*>(0)});
    case kTuttiCudaQueryEvent:
      return call(function, std::tuple{as<void>(o[0])});
    default:
      return call(function, std::tuple{stream});
  }
}

Result make_all(const tutti_cuda_driver& driver, const tutti_cuda_call* calls, uint64_t n,
                uint64_t* made) {
  for (*made = 0; *made < n; ++*made) {
    const tutti_cuda_call& one = calls[*made];
    if (const Result result = make(driver.of_kinds[one.kind], one); result != 0) return result;
  }
  return 0;
}

}  // namespace

int32_t tutti_cuda_calls(const tutti_cuda_driver* driver, uint64_t context,
                         const tutti_cuda_call* calls, uint64_t n, uint64_t* made) {
  Handle current = nullptr;
  *made = kNoContext;
  if (const Result r = call(driver->get_current, std::tuple{&current}); r != 0) return r;
  const bool is_foreign = current != as<void>(context);
  if (is_foreign) {
    if (const Result r = call(driver->push, std::tuple{as<void>(context)}); r != 0) return r;
  }
  // Thread-local capture mode: otherwise a query would end the capture of a graph by another thread
  // (pytorch/pytorch#104487).
  int mode = kOwnCaptures;
  const bool is_changed = call(driver->capture_mode, std::tuple{&mode}) == 0;
  const Result result = make_all(*driver, calls, n, made);
  if (is_changed) call(driver->capture_mode, std::tuple{&mode});
  if (is_foreign) call(driver->pop, std::tuple{&current});
  return result;
}

// A stand-in for libcuda.so.1: the entry points that Tutti calls, with the prototypes of cuda.h, so
// that cuda-bindings and CudaDriver run without a GPU.
//
// Arguments, handles, contexts and addresses are checked as the CUDA Driver API 13.0 (cuda.h) says,
// for an H200.  Streams are threads, memory is the host's, kernels run on fibers, each with the
// parameters that its own signature takes.  It is as strict as a driver may be: batches take no
// memory that is not registered, calls that may wait do, and streams share hardware queues.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "cuda_kernels.h"  // first: words of CUDA
// The device.
#include "cuda_contexts.h"
#include "cuda_state.h"
#include "ptx_machine.h"

using namespace machine;

namespace {

// The kernels' C++, or where STAND_IN_PTX names a module that ptx_text.py decoded, its PTX; what
// that one lacks can be found and not run.
const Kernel* find_kernel(const std::string& name) {
  static const char* path = std::getenv("STAND_IN_PTX");
  static const auto program = path == nullptr ? nullptr : ptx::read(path, &machine_of().memory);
  static const std::vector<Kernel> all =
      path == nullptr ? std::vector<Kernel>() : ptx::kernels(*program);
  const auto search = [&](const auto& kernels) -> const Kernel* {
    const auto has_name = [&](const Kernel& kernel) { return kernel.name == name; };
    const auto found = std::find_if(std::begin(kernels), std::end(kernels), has_name);
    return found == std::end(kernels) ? nullptr : &*found;
  };
  const Kernel* compiled = search(kKernels);
  if (path == nullptr || compiled == nullptr) return compiled;
  const Kernel* decoded = search(all);
  return decoded != nullptr ? decoded : &ptx::kMissing;
}

}  // namespace

CUresult cuInit(unsigned flags) {
  REFUSE_IF(flags != 0, CUDA_ERROR_INVALID_VALUE);
  machine_of().is_initialised = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = kVersion;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** name) { return name_of(code, name); }

CUresult cuGetErrorString(CUresult code, const char** text) { return name_of(code, text); }

// NVRTC looks for this one by name; without a table it goes on alone.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuDeviceGetCount(int* count) {
  REFUSE_IF(!machine_of().is_initialised, CUDA_ERROR_NOT_INITIALIZED);
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  REFUSE_IF(!machine_of().is_initialised, CUDA_ERROR_NOT_INITIALIZED);
  REFUSE_IF(ordinal != kDevice, CUDA_ERROR_INVALID_DEVICE);
  *device = kDevice;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  REFUSE_IF(device != kDevice, CUDA_ERROR_INVALID_DEVICE);
  const bool is_major = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
  const bool is_minor = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
  const bool is_limit = attribute == CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT;
  REFUSE_IF(!is_major && !is_minor && !is_limit, CUDA_ERROR_NOT_SUPPORTED);
  *value = is_major ? 9 : is_limit && machine_of().watchdog.is_on() ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* address, int nbytes, CUdevice device) {
  REFUSE_IF(device != kDevice, CUDA_ERROR_INVALID_DEVICE);
  return kPciAddress.copy(address, nbytes - 1) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  CHECK(enter());
  // Streams that wait for the legacy default stream are nothing that Tutti wants.
  REFUSE_IF(flags != CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
  CHECK(machine_of().drain());
  *stream = machine_of().streams.add<CUstream>(Stream::start(0));
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
  std::shared_ptr<Stream> stream;
  REFUSE_IF(handle == nullptr, CUDA_ERROR_INVALID_HANDLE);
  CHECK(find_stream(handle, &stream));
  machine_of().streams.take(handle);
  stream->end();
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  std::shared_ptr<Stream> stream;
  CHECK(find_stream(handle, &stream));
  return stream->is_done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                             unsigned flags) {
  CHECK(enter());
  REFUSE_IF(flags != CU_STREAM_WAIT_VALUE_GEQ || !is_word(address), CUDA_ERROR_INVALID_VALUE);
  return put(stream, [=] {
    // Pairs with the release of the word's writer.
    return static_cast<int32_t>(__atomic_load_n(at<uint32_t>(address), __ATOMIC_ACQUIRE) - value) >=
           0;
  });
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                              unsigned flags) {
  CHECK(enter());
  REFUSE_IF(flags != CU_STREAM_WRITE_VALUE_DEFAULT || !is_word(address), CUDA_ERROR_INVALID_VALUE);
  return put(stream, [=] {
    // Pairs with the acquire of the word's waiter.
    __atomic_store_n(at<uint32_t>(address), value, __ATOMIC_RELEASE);
    return true;
  });
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t nbytes, CUstream stream) {
  std::shared_ptr<Stream> found;
  CHECK(find_stream(stream, &found));
  const bool to_known = is_reached(target, nbytes), from_known = is_reached(source, nbytes);
  REFUSE_IF(!to_known && !from_known, CUDA_ERROR_INVALID_VALUE);
  const CUresult result = put(stream, [=] {
    std::memcpy(at<void>(target), at<void>(source), nbytes);
    return true;
  });
  // Host memory that is not registered is copied before the call returns.
  if (result == CUDA_SUCCESS && !(to_known && from_known) && !found->settle()) {
    return CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  return result;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds,
                            CUstream stream) {
  CHECK(enter());
  REFUSE_IF(stream == nullptr || stream == CU_STREAM_LEGACY, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(count == 0 || kinds == 0 || kinds > count || firsts[0] != 0, CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < kinds; ++i) {
    const CUmemcpySrcAccessOrder order = attributes[i].srcAccessOrder;
    REFUSE_IF(order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
              CUDA_ERROR_INVALID_VALUE);
    REFUSE_IF(attributes[i].flags > CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE,
              CUDA_ERROR_INVALID_VALUE);
    REFUSE_IF(i > 0 && (firsts[i] <= firsts[i - 1] || firsts[i] >= count),
              CUDA_ERROR_INVALID_VALUE);
  }
  using Copy = std::tuple<CUdeviceptr, CUdeviceptr, size_t>;
  std::vector<Copy> copies;
  for (size_t i = 0; i < count; ++i) {
    const bool is_known = is_reached(targets[i], sizes[i]) && is_reached(sources[i], sizes[i]);
    REFUSE_IF(!is_known, CUDA_ERROR_INVALID_VALUE);
    copies.emplace_back(targets[i], sources[i], sizes[i]);
  }
  // In any order among themselves.
  std::shuffle(copies.begin(), copies.end(), std::minstd_rand(static_cast<unsigned>(count)));
  return put(stream, [copies] {
    for (const auto& [target, source, nbytes] : copies) {
      std::memcpy(at<void>(target), at<void>(source), nbytes);
    }
    return true;
  });
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t nbytes, CUstream stream) {
  CHECK(enter());
  REFUSE_IF(!is_reached(target, nbytes), CUDA_ERROR_INVALID_VALUE);
  return put(stream, [=] {
    std::memset(at<void>(target), value, nbytes);
    return true;
  });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  CHECK(enter());
  REFUSE_IF(flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_VALUE);
  CHECK(machine_of().drain());
  *event = machine_of().events.add<CUevent>(std::make_shared<Event>());
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  CHECK(enter());
  REFUSE_IF(machine_of().events.take(event) == nullptr, CUDA_ERROR_INVALID_HANDLE);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  std::shared_ptr<Stream> stream;
  CHECK(find_stream(stream_handle, &stream));
  const std::shared_ptr<Event> event = machine_of().events.find(handle);
  REFUSE_IF(event == nullptr, CUDA_ERROR_INVALID_HANDLE);
  const std::lock_guard<std::mutex> lock(event->mutex);
  event->number = stream->put([] { return true; }, false);
  event->stream = stream;
  return event->number == 0 ? CUDA_ERROR_LAUNCH_TIMEOUT : CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  CHECK(enter());
  const std::shared_ptr<Event> event = machine_of().events.find(handle);
  REFUSE_IF(event == nullptr, CUDA_ERROR_INVALID_HANDLE);
  return event->is_done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned flags) {
  CHECK(enter());
  REFUSE_IF(flags != 0, CUDA_ERROR_INVALID_VALUE);
  const std::shared_ptr<Event> event = machine_of().events.find(handle);
  REFUSE_IF(event == nullptr, CUDA_ERROR_INVALID_HANDLE);
  std::shared_ptr<Stream> recorded;
  uint64_t number;
  {
    const std::lock_guard<std::mutex> lock(event->mutex);  // the record before this call counts
    recorded = event->stream;
    number = event->number;
  }
  return put(stream, [=] { return recorded == nullptr || recorded->is_past(number); });
}

CUresult cuMemHostRegister(void* address, size_t nbytes, unsigned flags) {
  CHECK(enter());
  REFUSE_IF(!can_be_registered(address, nbytes, flags), CUDA_ERROR_INVALID_VALUE);
  CHECK(machine_of().settle());
  const bool is_new = machine_of().memory.pin(reinterpret_cast<uint64_t>(address), nbytes);
  return is_new ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult cuMemHostUnregister(void* address) {
  CHECK(enter());
  CHECK(machine_of().settle());
  const bool was_pinned = machine_of().memory.unpin(reinterpret_cast<uint64_t>(address));
  return was_pinned ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* device, void* address, unsigned flags) {
  CHECK(enter());
  *device = reinterpret_cast<CUdeviceptr>(address);  // as with unified addressing
  REFUSE_IF(flags != 0 || !is_reached(*device, 1), CUDA_ERROR_INVALID_VALUE);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t nbytes) {
  CHECK(enter());
  REFUSE_IF(nbytes == 0, CUDA_ERROR_INVALID_VALUE);
  CHECK(machine_of().settle());
  *address = machine_of().memory.allocate(nbytes);
  return *address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr address) {
  CHECK(enter());
  CHECK(machine_of().settle());
  return machine_of().memory.free(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  CHECK(enter());
  auto made = std::make_shared<Module>();
  const CUresult wrong = read_cubin(image, &made->image);
  if (wrong == CUDA_SUCCESS) *module = machine_of().modules.add<CUmodule>(made);
  return wrong;
}

CUresult cuModuleUnload(CUmodule module) {
  CHECK(enter());
  CHECK(machine_of().settle());
  return machine_of().modules.take(module) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  CHECK(enter());
  const std::shared_ptr<Module> module = machine_of().modules.find(handle);
  REFUSE_IF(module == nullptr, CUDA_ERROR_INVALID_HANDLE);
  const std::string section = std::string(".text.") + name + '\0';
  REFUSE_IF(module->image.find(section) == std::string::npos, CUDA_ERROR_NOT_FOUND);
  const Function made = {find_kernel(name), module};
  REFUSE_IF(made.kernel == nullptr, CUDA_ERROR_NOT_FOUND);
  *function = machine_of().functions.add<CUfunction>(std::make_shared<Function>(made));
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
  CHECK(enter());
  const std::shared_ptr<Function> function = machine_of().functions.find(handle);
  const bool is_there = function != nullptr && !function->module.expired();
  return is_there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuLaunchKernel(CUfunction handle, unsigned grid, unsigned grid_y, unsigned grid_z,
                        unsigned block, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void** parameters, void** extra) {
  CHECK(enter());
  const std::shared_ptr<Function> function = machine_of().functions.find(handle);
  REFUSE_IF(function == nullptr || function->module.expired(), CUDA_ERROR_INVALID_HANDLE);
  const unsigned threads_max = std::min(function->kernel->threads_max, kBlockThreads);
  REFUSE_IF(grid == 0 || block == 0 || block > threads_max, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(parameters == nullptr || extra != nullptr, CUDA_ERROR_INVALID_VALUE);
  // Fibers have one dimension, whole warps, and the shared memory that kernels declare.
  REFUSE_IF(grid_y * grid_z * block_y * block_z != 1 || block % simt::kLanes != 0 || shared != 0,
            CUDA_ERROR_NOT_SUPPORTED);
  const Call call = function->kernel->capture(parameters);
  const auto run = [=] {
    const auto kernel = machine_of().watchdog.begin_kernel();
    if (!run_kernel(call, grid, block)) machine_of().error = CUDA_ERROR_LAUNCH_FAILED;
    machine_of().watchdog.end_kernel(kernel);
    return true;
  };
  return put(stream, run, true);
}

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  REFUSE_IF(device != kDevice, CUDA_ERROR_INVALID_DEVICE);
  REFUSE_IF(type != CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
  *resource = sms_of(kSms);
  return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(CUdevResource* groups, unsigned* count,
                                     const CUdevResource* input, CUdevResource* rest,
                                     unsigned flags, unsigned sms) {
  REFUSE_IF(count == nullptr || input == nullptr || flags != 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!is_sms(*input), CUDA_ERROR_INVALID_RESOURCE_TYPE);
  const unsigned step = input->sm.smCoscheduledAlignment;
  const unsigned size = std::max(kSmsStep, (sms + step - 1) / step * step);
  REFUSE_IF(size > input->sm.smCount, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  const unsigned most = input->sm.smCount / size;
  *count = groups == nullptr ? most : std::min(*count, most);
  for (unsigned i = 0; groups != nullptr && i < *count; ++i) groups[i] = sms_of(size);
  if (rest != nullptr) *rest = sms_of(input->sm.smCount - *count * size);
  return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* description, CUdevResource* resources,
                                   unsigned count) {
  REFUSE_IF(resources == nullptr || count == 0, CUDA_ERROR_INVALID_VALUE);
  auto made = std::make_shared<Description>();
  for (unsigned i = 0; i < count; ++i) {
    REFUSE_IF(!is_sms(resources[i]), CUDA_ERROR_INVALID_RESOURCE_TYPE);
    made->sms += resources[i].sm.smCount;
  }
  *description = machine_of().descriptions.add<CUdevResourceDesc>(made);
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx* context, CUdevResourceDesc description, CUdevice device,
                          unsigned flags) {
  REFUSE_IF(device != kDevice, CUDA_ERROR_INVALID_DEVICE);
  const std::shared_ptr<Description> found = machine_of().descriptions.find(description);
  REFUSE_IF(found == nullptr || flags != CU_GREEN_CTX_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE);
  ++machine_of().context_uses;
  *context = machine_of().greens.add<CUgreenCtx>(found);
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx context, unsigned flags, int) {
  REFUSE_IF(machine_of().greens.find(context) == nullptr, CUDA_ERROR_INVALID_CONTEXT);
  REFUSE_IF(flags != CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
  CHECK(machine_of().drain());
  const auto green = reinterpret_cast<uint64_t>(context);
  *stream = machine_of().streams.add<CUstream>(Stream::start(green));
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx context) {
  REFUSE_IF(machine_of().greens.take(context) == nullptr, CUDA_ERROR_INVALID_CONTEXT);
  --machine_of().context_uses;
  return CUDA_SUCCESS;
}

namespace {

// since: the CUDA version of this form, as in cudaTypedefs.h.
struct EntryPoint {
  const char* name;
  int since;
  void* function;
};

#define SINCE(name, version) {#name, version, reinterpret_cast<void*>(name)}
const EntryPoint kEntryPoints[] = {SINCE(cuInit, 2000),
                                   SINCE(cuDriverGetVersion, 2020),
                                   SINCE(cuDeviceGet, 2000),
                                   SINCE(cuDeviceGetCount, 2000),
                                   SINCE(cuDeviceGetAttribute, 2000),
                                   SINCE(cuDeviceGetPCIBusId, 4010),
                                   SINCE(cuDevicePrimaryCtxRetain, 7000),
                                   SINCE(cuDevicePrimaryCtxRelease, 11000),
                                   SINCE(cuCtxGetCurrent, 4000),
                                   SINCE(cuCtxPushCurrent, 4000),
                                   SINCE(cuCtxPopCurrent, 4000),
                                   SINCE(cuGetProcAddress, 12000),
                                   SINCE(cuGetErrorName, 6000),
                                   SINCE(cuGetErrorString, 6000),
                                   SINCE(cuThreadExchangeStreamCaptureMode, 10010),
                                   SINCE(cuStreamCreateWithPriority, 5050),
                                   SINCE(cuStreamDestroy, 4000),
                                   SINCE(cuStreamQuery, 2000),
                                   SINCE(cuStreamWaitValue32, 11070),
                                   SINCE(cuStreamWriteValue32, 11070),
                                   SINCE(cuMemcpyAsync, 4000),
                                   SINCE(cuMemcpyBatchAsync, 13000),
                                   SINCE(cuMemsetD8Async, 3020),
                                   SINCE(cuEventCreate, 2000),
                                   SINCE(cuEventDestroy, 4000),
                                   SINCE(cuEventRecord, 2000),
                                   SINCE(cuStreamWaitEvent, 3020),
                                   SINCE(cuEventQuery, 2000),
                                   SINCE(cuMemHostRegister, 6050),
                                   SINCE(cuMemHostUnregister, 4000),
                                   SINCE(cuMemHostGetDevicePointer, 3020),
                                   SINCE(cuMemAlloc, 3020),
                                   SINCE(cuMemFree, 3020),
                                   SINCE(cuModuleLoadData, 2000),
                                   SINCE(cuModuleUnload, 2000),
                                   SINCE(cuModuleGetFunction, 2000),
                                   SINCE(cuFuncLoad, 12040),
                                   SINCE(cuLaunchKernel, 4000),
                                   SINCE(cuDeviceGetDevResource, 12040),
                                   SINCE(cuDevSmResourceSplitByCount, 12040),
                                   SINCE(cuDevResourceGenerateDesc, 12040),
                                   SINCE(cuGreenCtxCreate, 12040),
                                   SINCE(cuGreenCtxStreamCreate, 12050),
                                   SINCE(cuGreenCtxDestroy, 12040)};

}  // namespace

CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult* status) {
  REFUSE_IF(version > kVersion || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
            CUDA_ERROR_INVALID_VALUE);
  *function = nullptr;
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  for (const EntryPoint& entry : kEntryPoints) {
    if (std::strcmp(entry.name, name) != 0) continue;
    const bool is_new_enough = version >= entry.since;
    found =
        is_new_enough ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    if (is_new_enough) *function = entry.function;
  }
  if (status != nullptr) *status = found;
  return CUDA_SUCCESS;
}

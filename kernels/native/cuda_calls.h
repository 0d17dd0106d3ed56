// Many calls of CUDA's driver in one: calls that enqueue work on a stream, or query its progress.
//
// Loaded by tutti/gio_uring/gpu/calls.py through ctypes, which releases the GIL once for all of
// them. The driver is not linked: its functions, from cuGetProcAddress, are passed.
// Names and arguments: CUDA Driver API reference manual, 13.0.
#ifndef TUTTI_NATIVE_CUDA_CALLS_H_
#define TUTTI_NATIVE_CUDA_CALLS_H_

#include <cstdint>

#include "api.h"

enum TuttiCudaKind : uint32_t {
  kTuttiCudaWaitValue,    // operands: address, value
  kTuttiCudaWriteValue,   // address, value
  kTuttiCudaCopy,         // target, source, bytes
  kTuttiCudaCopyBatch,    // arrays of targets, sources and bytes, CUmemcpyAttributes; count
  kTuttiCudaFill,         // target, value, bytes
  kTuttiCudaRecordEvent,  // event
  kTuttiCudaWaitEvent,    // event
  kTuttiCudaLaunch,       // function, threads of a block, array of arguments; count of blocks
  kTuttiCudaQueryEvent,   // event
  kTuttiCudaQueryStream,
  kTuttiCudaKinds,
};

struct tutti_cuda_call {
  uint32_t kind;
  uint32_t count;
  uint64_t stream;
  uint64_t operands[4];
};

// Functions of the driver. get_current, push, pop: cuCtxGetCurrent, cuCtxPushCurrent and
// cuCtxPopCurrent. capture_mode: cuThreadExchangeStreamCaptureMode.
struct tutti_cuda_driver {
  void* get_current;
  void* push;
  void* pop;
  void* capture_mode;
  void* of_kinds[kTuttiCudaKinds];
};

// Makes n calls, in order, in a context; restores the thread's context and capture mode. Returns
// the first CUresult that is not 0; made: the number of calls that succeeded, or UINT64_MAX if the
// context could not be made current.
TUTTI_API int32_t tutti_cuda_calls(const struct tutti_cuda_driver* driver, uint64_t context,
                                   const struct tutti_cuda_call* calls, uint64_t n, uint64_t* made);

#endif  // TUTTI_NATIVE_CUDA_CALLS_H_

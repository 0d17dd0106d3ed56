// Contexts of a thread, and which graph captures its calls count, for the stand-in of libcuda.so.1.
#pragma once

#include <utility>

#include "cuda_state.h"

using namespace machine;

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  REFUSE_IF(!machine_of().is_initialised, CUDA_ERROR_NOT_INITIALIZED);
  REFUSE_IF(device != kDevice, CUDA_ERROR_INVALID_DEVICE);
  ++machine_of().context_uses;
  *context = primary();
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  REFUSE_IF(device != kDevice, CUDA_ERROR_INVALID_DEVICE);
  REFUSE_IF(machine_of().context_uses == 0, CUDA_ERROR_INVALID_CONTEXT);
  --machine_of().context_uses;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  REFUSE_IF(!machine_of().is_initialised, CUDA_ERROR_NOT_INITIALIZED);
  *context = contexts().empty() ? nullptr : contexts().back();
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  REFUSE_IF(context != primary(), CUDA_ERROR_INVALID_CONTEXT);
  contexts().push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  REFUSE_IF(contexts().empty(), CUDA_ERROR_INVALID_CONTEXT);
  if (context != nullptr) *context = contexts().back();
  contexts().pop_back();
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  static thread_local CUstreamCaptureMode of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;
  REFUSE_IF(!machine_of().is_initialised, CUDA_ERROR_NOT_INITIALIZED);
  REFUSE_IF(*mode > CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  std::swap(*mode, of_thread);
  return CUDA_SUCCESS;
}

// Devices, memory, streams and events: thin, checked, nothing hidden.
#include <cuda_runtime.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../formats/formats.h"
#include "../status.h"
#include "probe.h"

using engram::fail;

const char* engram_architectures(void) { return ENGRAM_ARCHITECTURES; }

int64_t engram_row_bytes(int32_t format, int64_t row_values) {
  return engram::row_bytes(format, row_values);
}

engram_status engram_device_count(int32_t* count) {
  int found = 0;
  ENGRAM_CUDA(cudaGetDeviceCount(&found));
  *count = found;
  return ENGRAM_OK;
}

engram_status engram_device_info(int32_t index, engram_device* info) {
  cudaDeviceProp prop;
  ENGRAM_CUDA(cudaGetDeviceProperties(&prop, index));
  ENGRAM_CUDA(cudaSetDevice(index));
  *info = {};
  snprintf(info->name, sizeof info->name, "%s", prop.name);
  info->major = prop.major;
  info->minor = prop.minor;
  info->num_sms = prop.multiProcessorCount;
  info->integrated = prop.integrated;
  info->has_image = engram::has_image_for_device() ? 1 : 0;
  info->total_bytes = static_cast<int64_t>(prop.totalGlobalMem);
  info->free_bytes = -1;
  // On integrated devices cudaMemGetInfo counts the page cache as used, or fails.
  if (!prop.integrated) {
    size_t free_bytes = 0, total_bytes = 0;
    ENGRAM_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    info->free_bytes = static_cast<int64_t>(free_bytes);
  }
  return ENGRAM_OK;
}

engram_status engram_device_select(int32_t index) {
  ENGRAM_CUDA(cudaSetDevice(index));
  return ENGRAM_OK;
}

engram_status engram_device_alloc(int64_t num_bytes, void** pointer) {
  ENGRAM_REQUIRE(num_bytes >= 0, "device_alloc: expected num_bytes >= 0, got %lld",
                 static_cast<long long>(num_bytes));
  ENGRAM_CUDA(cudaMalloc(pointer, static_cast<size_t>(num_bytes) + 16));
  return ENGRAM_OK;
}

engram_status engram_device_free(void* pointer) {
  ENGRAM_CUDA(cudaFree(pointer));
  return ENGRAM_OK;
}

// Says why memory was refused; the runtime's copy of the error is not to be found after somebody
// else's launch.
static engram_status refused(engram_status status, const char* what, int64_t num_bytes,
                             cudaError_t error) {
  cudaGetLastError();
  return fail(status, "%s of %lld bytes: %s", what, static_cast<long long>(num_bytes),
              cudaGetErrorString(error));
}

engram_status engram_host_alloc(int64_t num_bytes, void** pointer) {
  ENGRAM_REQUIRE(num_bytes > 0, "host_alloc: expected num_bytes > 0, got %lld",
                 static_cast<long long>(num_bytes));
  const cudaError_t status = cudaHostAlloc(pointer, static_cast<size_t>(num_bytes),
                                           cudaHostAllocMapped | cudaHostAllocPortable);
  return status == cudaSuccess ? ENGRAM_OK
                               : refused(ENGRAM_CUDA_ERROR, "host_alloc", num_bytes, status);
}

engram_status engram_host_free(void* pointer) {
  ENGRAM_CUDA(cudaFreeHost(pointer));
  return ENGRAM_OK;
}

engram_status engram_host_register(void* pointer, int64_t num_bytes) {
  ENGRAM_REQUIRE(pointer != nullptr && num_bytes > 0,
                 "host_register: expected a pointer and num_bytes > 0, got %p %lld", pointer,
                 static_cast<long long>(num_bytes));
  // The kernels are given the host's address.
  int is_same_address = 0, device = 0;
  ENGRAM_CUDA(cudaGetDevice(&device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&is_same_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                     device));
  if (!is_same_address)
    return fail(ENGRAM_UNSUPPORTED, "host_register: registered memory has another address here");
  const cudaError_t status = cudaHostRegister(pointer, static_cast<size_t>(num_bytes),
                                              cudaHostRegisterMapped | cudaHostRegisterPortable);
  return status == cudaSuccess ? ENGRAM_OK
                               : refused(ENGRAM_UNSUPPORTED, "host_register", num_bytes, status);
}

engram_status engram_host_unregister(void* pointer) {
  ENGRAM_CUDA(cudaHostUnregister(pointer));
  return ENGRAM_OK;
}

engram_status engram_stream_create(int32_t is_urgent, engram_stream* stream) {
  int least = 0, greatest = 0;
  ENGRAM_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t created;
  ENGRAM_CUDA(
      cudaStreamCreateWithPriority(&created, cudaStreamNonBlocking, is_urgent ? greatest : least));
  *stream = created;
  return ENGRAM_OK;
}

engram_status engram_stream_destroy(engram_stream stream) {
  ENGRAM_CUDA(cudaStreamDestroy(static_cast<cudaStream_t>(stream)));
  return ENGRAM_OK;
}

engram_status engram_event_create(int32_t is_timed, engram_event* event) {
  cudaEvent_t created;
  ENGRAM_CUDA(
      cudaEventCreateWithFlags(&created, is_timed ? cudaEventDefault : cudaEventDisableTiming));
  *event = created;
  return ENGRAM_OK;
}

engram_status engram_event_destroy(engram_event event) {
  ENGRAM_CUDA(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
  return ENGRAM_OK;
}

engram_status engram_event_record(engram_event event, engram_stream stream) {
  ENGRAM_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
  return ENGRAM_OK;
}

engram_status engram_event_elapsed_us(engram_event begin, engram_event end, float* us) {
  float ms = 0;
  ENGRAM_CUDA(
      cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)));
  *us = ms * 1000.0f;
  return ENGRAM_OK;
}

engram_status engram_stream_wait(engram_stream stream, engram_event event) {
  ENGRAM_CUDA(
      cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
  return ENGRAM_OK;
}

engram_status engram_event_is_done(engram_event event, int32_t* is_done) {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (status == cudaErrorNotReady) {
    *is_done = 0;
    return ENGRAM_OK;
  }
  ENGRAM_CUDA(status);
  *is_done = 1;
  return ENGRAM_OK;
}

static int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

engram_status engram_event_wait(engram_event event, int64_t timeout_ms) {
  // A wake-up from sleep costs some 60 us, so the usual wait is spun through.
  constexpr int64_t kSpinNs = 500 * 1000;
  const int64_t begin = now_ns();
  for (;;) {
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (status == cudaSuccess) return ENGRAM_OK;
    if (status != cudaErrorNotReady)
      return fail(ENGRAM_CUDA_ERROR, "launch failed: %s", cudaGetErrorString(status));
    const int64_t waited = now_ns() - begin;
    if (waited > timeout_ms * 1000000LL)
      return fail(ENGRAM_TIMEOUT, "a launch did not finish within %lld ms",
                  static_cast<long long>(timeout_ms));
    if (waited > kSpinNs) {
      const timespec pause{0, 20 * 1000};
      nanosleep(&pause, nullptr);
    }
  }
}

static engram_status refuse_pageable(const void* pointer, const char* which) {
  cudaPointerAttributes attributes;
  ENGRAM_CUDA(cudaPointerGetAttributes(&attributes, pointer));
  ENGRAM_REQUIRE(attributes.type != cudaMemoryTypeUnregistered,
                 "copy: expected %s to be device or pinned memory, got pageable memory", which);
  return ENGRAM_OK;
}

engram_status engram_copy(void* to, const void* from, int64_t num_bytes, engram_stream stream) {
  if (num_bytes == 0) return ENGRAM_OK;
  ENGRAM_REQUIRE(num_bytes > 0 && to != nullptr && from != nullptr,
                 "copy: expected two pointers and num_bytes >= 0, got %p %p %lld", to, from,
                 static_cast<long long>(num_bytes));
  if (const engram_status status = refuse_pageable(to, "to")) return status;
  if (const engram_status status = refuse_pageable(from, "from")) return status;
  ENGRAM_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault,
                              static_cast<cudaStream_t>(stream)));
  return ENGRAM_OK;
}

engram_status engram_fill(void* to, int32_t byte, int64_t num_bytes, engram_stream stream) {
  if (num_bytes == 0) return ENGRAM_OK;
  ENGRAM_CUDA(
      cudaMemsetAsync(to, byte, static_cast<size_t>(num_bytes), static_cast<cudaStream_t>(stream)));
  return ENGRAM_OK;
}

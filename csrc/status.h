// Status and text of the calling thread's last failure.
#pragma once

#include "engram.h"

namespace engram {

// Stores the text and returns the status.
[[gnu::format(printf, 2, 3)]] engram_status fail(engram_status status, const char* format, ...);

}  // namespace engram

#define ENGRAM_REQUIRE(condition, ...)                                  \
  do {                                                                  \
    if (!(condition)) return engram::fail(ENGRAM_INVALID, __VA_ARGS__); \
  } while (0)

#define ENGRAM_CUDA(call)                                                                   \
  do {                                                                                      \
    const cudaError_t status_ = (call);                                                     \
    if (status_ != cudaSuccess)                                                             \
      return engram::fail(ENGRAM_CUDA_ERROR, "%s: %s", #call, cudaGetErrorString(status_)); \
  } while (0)

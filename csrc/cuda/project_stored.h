// The two forms of the projection over wkv as stored: project_stored.cu calls both.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "../engram.h"

namespace engram {

struct StoredArgs;

// ENGRAM_UNSUPPORTED where the device is not of compute capability 9.0.
engram_status launch_wgmma(int32_t format, const StoredArgs& args, cudaStream_t stream);

}  // namespace engram

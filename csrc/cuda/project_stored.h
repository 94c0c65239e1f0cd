// The forms of the projection over wkv as stored: project_stored.cu calls them.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "../engram.h"

namespace engram {

struct StoredArgs;

// ENGRAM_UNSUPPORTED where the device is not of compute capability 9.0.
engram_status launch_wgmma(int32_t format, const StoredArgs& args, cudaStream_t stream);

// The same up to 8 tokens. decode_takes: whether it multiplies such a batch.
bool decode_takes(const StoredArgs& args);
engram_status launch_decode(int32_t format, const StoredArgs& args, cudaStream_t stream);

}  // namespace engram

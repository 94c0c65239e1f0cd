// The forms of the projection over wkv as stored: project_stored.cu calls them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../engram.h"
#include "slots.cuh"

namespace engram {

struct StoredArgs {
  const __nv_bfloat16* rows;
  const uint8_t* wkv;
  __nv_bfloat16* kv;
  int64_t num_tokens, in_features, out_features;
  SlotList list;
};

// E4M3: the scales of a tile, a byte a unit.
__device__ __forceinline__ const uint8_t* scales_of(const StoredArgs& args, int64_t tile) {
  return args.wkv + args.out_features * args.in_features + tile / 2 * (args.in_features / 32);
}

// ENGRAM_UNSUPPORTED where the device is not of compute capability 9.0.
engram_status launch_wgmma(int32_t format, const StoredArgs& args, cudaStream_t stream);

// The same up to 8 tokens. decode_takes: whether it multiplies such a batch.
bool decode_takes(const StoredArgs& args);
engram_status launch_decode(int32_t format, const StoredArgs& args, cudaStream_t stream);

}  // namespace engram

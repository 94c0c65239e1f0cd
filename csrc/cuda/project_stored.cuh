// What the forms of the projection over wkv as stored share: arguments, the way out, launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../engram.h"
#include "../formats/arranged.h"
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

// Shared memory that a warp's way out takes: [token][output], rows of 16-byte chunks, no two tokens
// of a store in one bank.
constexpr int output_bytes(int num_tokens, int num_tiles) {
  return num_tokens * (num_tiles * kTileOutputs + 8) * 2;
}

// Accumulators -> the warp's part of shared memory -> 16-byte stores.
template <int kTokens, int kTiles>
__device__ __forceinline__ void store_outputs(const StoredArgs& args,
                                              const float (&sums)[kTiles][kTokens / 8][4],
                                              uint8_t* shared, int64_t output, int lane) {
  constexpr int kOutputs = kTiles * kTileOutputs, kPitch = kOutputs + 8;
  __nv_bfloat16* part = reinterpret_cast<__nv_bfloat16*>(shared);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        part[(n * 8 + lane % 4 * 2 + i % 2) * kPitch + tile * kTileOutputs + lane / 4 + i / 2 * 8] =
            __float2bfloat16_rn(sums[tile][n][i]);
  __syncwarp();
  for (int i = lane; i < kTokens * (kOutputs / 8); i += 32) {
    const int token = i / (kOutputs / 8), chunk = i % (kOutputs / 8);
    if (token >= args.num_tokens) break;
    *reinterpret_cast<uint4*>(args.kv + args.list.slot(token) * args.out_features + output +
                              chunk * 8) =
        *reinterpret_cast<const uint4*>(part + token * kPitch + chunk * 8);
  }
}

// On a device of compute capability 9.0: up to 8 tokens where decode_takes() them, up to 64.
bool decode_takes(const StoredArgs& args);
engram_status launch_decode(int32_t format, const StoredArgs& args, int num_sms,
                            cudaStream_t stream);
engram_status launch_wgmma(int32_t format, const StoredArgs& args, int num_sms,
                           cudaStream_t stream);

}  // namespace engram

// 16-byte vectors of eight bf16, and the conversions around them.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace engram {

// Two floats -> packed bf16, nearest even (one instruction).
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 pack_bf16(const float (&y)[8]) {
  return {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]),
          pack_bf16(y[6], y[7])};
}

__device__ __forceinline__ void unpack_bf16(const uint4& packed, float (&y)[8]) {
  const uint32_t word[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[2 * i] = __uint_as_float(word[i] << 16);
    y[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000u);
  }
}

}  // namespace engram

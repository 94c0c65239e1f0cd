// A lane's loads of wkv as stored, where it lies: what decodes it is written against either.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace engram {

// Device memory. Weights are read once: past L1.
struct DeviceBytes {
  const uint8_t* at;

  __device__ __forceinline__ DeviceBytes operator+(int64_t offset) const { return {at + offset}; }

  __device__ __forceinline__ uint4 load16(int offset) const {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at + offset));
    return v;
  }

  __device__ __forceinline__ uint2 load8(int offset) const {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(at + offset));
    return v;
  }

  __device__ __forceinline__ uint32_t load4(int offset) const {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at + offset));
    return v;
  }

  __device__ __forceinline__ uint32_t load2(int offset) const {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at + offset));
    return v;
  }
};

// Shared memory, by its 32-bit address.
struct SharedBytes {
  uint32_t at;

  __device__ __forceinline__ SharedBytes operator+(int offset) const { return {at + offset}; }

  __device__ __forceinline__ uint4 load16(int offset) const {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at + offset));
    return v;
  }

  __device__ __forceinline__ uint2 load8(int offset) const {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at + offset));
    return v;
  }

  __device__ __forceinline__ uint32_t load4(int offset) const {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at + offset));
    return v;
  }

  __device__ __forceinline__ uint32_t load2(int offset) const {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at + offset));
    return v;
  }
};

}  // namespace engram

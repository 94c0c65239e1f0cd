// Words that one lane of four has computed, handed to the other three.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace engram {

// kWords of each lane, read by the four lanes of its group: lane l's from lane l / 4 * 4 + owner.
template <int kWords>
struct ByShuffle {
  static constexpr int kBytes = 0;
  uint32_t mine[kWords];

  __device__ __forceinline__ void start(uint32_t, int) {}

  __device__ __forceinline__ void put(int, const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) mine[i] = words[i];
  }

  template <int kFirst, int kOwner, int kCount>
  __device__ __forceinline__ void get(int, uint32_t (&words)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      words[i] = __shfl_sync(0xFFFFFFFFu, mine[kFirst + i], kOwner, 4);
  }
};

// The same through kBytes of shared memory a warp: a shuffle costs as much there as 16 bytes do.
// Two halves in turn (`turn`), so that one __syncwarp a put is enough. Swizzled so that neither
// side meets bank conflicts.
template <int kWords>
struct BySharedMemory {
  static constexpr int kChunks = kWords / 4, kHalf = kChunks * 512, kBytes = 2 * kHalf;
  uint32_t to, from[4];

  __device__ __forceinline__ void start(uint32_t shared, int lane) {
    to = address(shared, lane / 4, lane % 4);
#pragma unroll
    for (int owner = 0; owner < 4; ++owner) from[owner] = address(shared, lane / 4, owner);
  }

  __device__ __forceinline__ void put(int turn, const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      asm volatile(
          "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + turn * kHalf + chunk * 512),
          "r"(words[chunk * 4]), "r"(words[chunk * 4 + 1]), "r"(words[chunk * 4 + 2]),
          "r"(words[chunk * 4 + 3])
          : "memory");
    __syncwarp();
  }

  template <int kFirst, int kOwner, int kCount>
  __device__ __forceinline__ void get(int turn, uint32_t (&words)[kCount]) const {
    static_assert(kFirst % 4 == 0 && kCount % 4 == 0, "whole chunks");
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "r"(from[kOwner] + turn * kHalf + (kFirst + i) / 4 * 512));
  }

 private:
  __device__ __forceinline__ static uint32_t address(uint32_t shared, int group, int owner) {
    return shared + (owner * 8 + (group ^ (2 * owner))) * 16;
  }
};

}  // namespace engram

// Hopper's asynchronous tensor-core step (sm_90a alone).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace engram {

// Tokens in shared memory, K-major: rows of 64 k (128 bytes), eight rows an atom of 1024 bytes,
// 16-byte chunks swizzled by row; the next 16 k lie 32 bytes on. The low word of a descriptor is
// the address in units of 16 bytes, so that steps are additions.
__device__ __forceinline__ uint32_t descriptor_word(uint32_t address) {
  return ((address & 0x3FFFFu) >> 4) | (1u << 16);
}

__device__ __forceinline__ uint64_t descriptor(uint32_t word) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(word), "n"((1024 >> 4) | (1 << 30)));
  return d;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps registers that a pending step reads or writes where they are until here.
__device__ __forceinline__ void hold(uint32_t (&a)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

template <int kGroups>
__device__ __forceinline__ void hold(float (&d)[kGroups][4]) {
#pragma unroll
  for (int i = 0; i < kGroups * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

#define ENGRAM_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define ENGRAM_AB "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// d += a (16 outputs a warp, 16 k) x the tokens at b: d[n] as in mma.sync.m16n8k16
__device__ __forceinline__ void multiply_async(float (&d)[2][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b64 p, %12, %12;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
      : ENGRAM_D(0), ENGRAM_D(1)
      : ENGRAM_AB);
}

__device__ __forceinline__ void multiply_async(float (&d)[4][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b64 p, %20, %20;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : ENGRAM_D(0), ENGRAM_D(1), ENGRAM_D(2), ENGRAM_D(3)
      : ENGRAM_AB);
}

__device__ __forceinline__ void multiply_async(float (&d)[8][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b64 p, %36, %36;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : ENGRAM_D(0), ENGRAM_D(1), ENGRAM_D(2), ENGRAM_D(3), ENGRAM_D(4), ENGRAM_D(5), ENGRAM_D(6),
        ENGRAM_D(7)
      : ENGRAM_AB);
}

#undef ENGRAM_AB
#define ENGRAM_AB "l"(a), "l"(b)

// The same with a from shared memory (see tile_descriptor).
__device__ __forceinline__ void multiply_async(float (&d)[2][4], uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b64 p, %9, %9;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1, 0, 0;}"
      : ENGRAM_D(0), ENGRAM_D(1)
      : ENGRAM_AB);
}

__device__ __forceinline__ void multiply_async(float (&d)[4][4], uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b64 p, %17, %17;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;}"
      : ENGRAM_D(0), ENGRAM_D(1), ENGRAM_D(2), ENGRAM_D(3)
      : ENGRAM_AB);
}

__device__ __forceinline__ void multiply_async(float (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b64 p, %33, %33;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}"
      : ENGRAM_D(0), ENGRAM_D(1), ENGRAM_D(2), ENGRAM_D(3), ENGRAM_D(4), ENGRAM_D(5), ENGRAM_D(6),
        ENGRAM_D(7)
      : ENGRAM_AB);
}

#undef ENGRAM_D
#undef ENGRAM_AB

// 16 outputs and 16 k in shared memory, not swizzled: matrices of 8 outputs x 8 k (128 bytes), that
// of the other 8 outputs next to it, those of the other 8 k 256 bytes on: the registers of mma.sync
// in their order. Of the 64 outputs that wgmma reads the others are whatever follows.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(d)
      : "r"(((address & 0x3FFFFu) >> 4) | ((256u >> 4) << 16)), "n"(128 >> 4));
  return d;
}

// What this thread wrote to shared memory becomes visible to steps that start after a barrier.
__device__ __forceinline__ void publish_to_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace engram

#endif

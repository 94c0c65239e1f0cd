// Barriers in shared memory, and the bulk copies that count themselves there (sm_90a alone).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace engram {

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Arrives, and has the phase wait for so many bytes of copies.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

// Bytes in a row to shared memory, 16-byte aligned; the barrier's phase counts them.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t num_bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(num_bytes), "r"(barrier)
      : "memory");
}

// A box of a tensor map of three dimensions, from (0, 0, z) on.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(0), "r"(z), "r"(barrier)
      : "memory");
}

// The rest without a branch: one between two steps of wgmma would have the compiler wait for the
// first before it begins the second. So these have their predicates inside.
__device__ __forceinline__ void barrier_arrive_if(bool does, uint32_t barrier) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier),
      "r"(static_cast<int>(does))
      : "memory");
}

// barrier_expect and copy_bulk.
__device__ __forceinline__ void copy_bulk_if(bool does, uint32_t to, const void* from,
                                             uint32_t num_bytes, uint32_t barrier) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %4, 0;\n"
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
      "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];}" ::"r"(to),
      "l"(from), "r"(num_bytes), "r"(barrier), "r"(static_cast<int>(does))
      : "memory");
}

}  // namespace engram

#endif

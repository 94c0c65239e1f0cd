// kv out of slots, as [T, HC + 1, dim]; dead positions are keys +0 and value -0.
#include <cuda_runtime.h>

#include "../status.h"
#include "slots.cuh"

namespace engram {

struct ReadArgs {
  const uint4* kv;
  uint4* out;
  int32_t vectors;      // of one key or value
  int32_t num_vectors;  // of one token
  SlotList list;
};

constexpr int kReadThreads = 256;
constexpr int kReadBlocks = 4;  // a token

__global__ void __launch_bounds__(kReadThreads)
    read_kv_kernel(const __grid_constant__ ReadArgs args) {
  const int64_t token = blockIdx.x / kReadBlocks;
  const int part = blockIdx.x % kReadBlocks;
  const bool is_dead = args.list.dead(token);
  const int64_t base = is_dead ? 0 : args.list.slot(token) * args.num_vectors;
  for (int i = part * kReadThreads + threadIdx.x; i < args.num_vectors;
       i += kReadBlocks * kReadThreads) {
    const uint32_t zero = i < args.num_vectors - args.vectors ? 0u : 0x80008000u;
    uint4 data{zero, zero, zero, zero};
    if (!is_dead) data = args.kv[base + i];
    args.out[token * args.num_vectors + i] = data;
  }
}

}  // namespace engram

engram_status engram_read_kv(const engram_read_kv_params* params) {
  using namespace engram;
  ENGRAM_REQUIRE(
      params->hc_mult >= 1 && params->hc_mult <= 4 && params->dim > 0 && params->dim % 8 == 0,
      "read_kv: expected hc_mult 1..4 and dim in multiples of 8, got %d and %d", params->hc_mult,
      params->dim);
  ENGRAM_REQUIRE(params->num_tokens >= 0 && params->num_tokens <= (1 << 28),
                 "read_kv: expected 0..2^28 tokens, got %lld",
                 static_cast<long long>(params->num_tokens));
  if (params->num_tokens == 0) return ENGRAM_OK;
  ReadArgs args{};
  args.kv = static_cast<const uint4*>(params->kv);
  args.out = static_cast<uint4*>(params->out);
  args.vectors = params->dim / 8;
  args.num_vectors = args.vectors * (params->hc_mult + 1);
  fill_slot_list(args.list, params->slots, params->is_dead, params->num_tokens);
  read_kv_kernel<<<static_cast<unsigned>(params->num_tokens * kReadBlocks), kReadThreads, 0,
                   static_cast<cudaStream_t>(params->stream)>>>(args);
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

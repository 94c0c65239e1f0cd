// The chain projection: the yardstick of bits, and the fastest form for small batches.
//
//   kv[slot[t], n] = bf16(sum over k of wkv[n, k] * rows[t, k])
//
// One f32 accumulator a value in mma.sync.m16n8k16, k ascending by 16: the result of a token does
// not depend on T, on its place or on the tile it falls into. A block owns 64 outputs and kTokens
// tokens; four warps own 16 outputs each; tiles of kDepth k pass through kStages stages of shared
// memory (cp.async), 16-byte chunks of a row swizzled by row so that ldmatrix is free of bank
// conflicts. Chunks behind the end of k, of the outputs or of the tokens are zero.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../status.h"
#include "dependent.cuh"
#include "mma.cuh"
#include "slots.cuh"

namespace engram {

constexpr int kProjectThreads = 128;
constexpr int kOutputs = 64;  // a block

// Tokens of a batch class, k of a stage, stages. Up to 8 tokens 256 bytes of each row at a time are
// 1.5 us of 78 faster than 128; with more the blocks of a multiprocessor become too few.
template <int kTokensOf, int kDepthOf, int kStagesOf>
struct ChainClass {
  static constexpr int kTokens = kTokensOf, kDepth = kDepthOf, kStages = kStagesOf;
  static constexpr int kWeightBytes = kOutputs * kDepth * 2;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kDepth * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024, "devices of compute capability 12 have 99 KB a block");
  static_assert(kTokens * (kOutputs + 8) * 2 <= kSharedBytes, "the store tile re-uses the stages");
};

struct ProjectArgs {
  const __nv_bfloat16* rows;
  const __nv_bfloat16* wkv;
  __nv_bfloat16* kv;
  int64_t num_tokens, in_features, out_features;
  SlotList list;
};

template <int kDepth>
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + row * (kDepth * 2) + ((chunk ^ (row & 7)) << 4);
}

template <int kRows, int kDepth>
__device__ __forceinline__ void copy_tile(uint32_t tile, const __nv_bfloat16* matrix, int64_t first,
                                          int64_t num_rows, int64_t k, int64_t in_features) {
  constexpr int kChunks = kRows * (kDepth / 8);
#pragma unroll
  for (int base = 0; base < kChunks; base += kProjectThreads) {
    const int index = base + static_cast<int>(threadIdx.x);
    if (kChunks % kProjectThreads != 0 && index >= kChunks) break;
    const int row = index / (kDepth / 8), chunk = index % (kDepth / 8);
    const int64_t column = k + chunk * 8;
    const bool is_inside = first + row < num_rows && column < in_features;
    const __nv_bfloat16* from = is_inside ? matrix + (first + row) * in_features + column : matrix;
    copy_chunk(chunk_address<kDepth>(tile, row, chunk), from, is_inside);
  }
}

// One stage: kDepth of k for 16 outputs and kTokens tokens, k ascending.
template <int kTokens, int kDepth>
__device__ __forceinline__ void multiply_stage(float (&sums)[kTokens / 8][4], uint32_t weights,
                                               uint32_t tokens, int warp, int lane) {
  const int matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int step = 0; step < kDepth; step += 32) {
    uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_matrices(a[half], chunk_address<kDepth>(weights, warp * 16 + row + (matrix & 1) * 8,
                                                   step / 8 + half * 2 + matrix / 2));
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      uint32_t b[4];  // 8 tokens, 32 of k
      load_matrices(b, chunk_address<kDepth>(tokens, n * 8 + row, step / 8 + matrix));
      multiply(sums[n], a[0], b[0], b[1]);
      multiply(sums[n], a[1], b[2], b[3]);
    }
  }
}

// Accumulators -> shared memory [token][output] -> 16-byte stores along the outputs of a token.
template <int kTokens>
__device__ __forceinline__ void store_tile(const ProjectArgs& args,
                                           const float (&sums)[kTokens / 8][4], __nv_bfloat16* tile,
                                           int64_t output, int64_t token) {
  constexpr int kPitch = kOutputs + 8;  // 16-byte rows, no two tokens of a store in one bank
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile[(n * 8 + lane % 4 * 2 + i % 2) * kPitch + warp * 16 + lane / 4 + i / 2 * 8] =
          __float2bfloat16_rn(sums[n][i]);
  __syncthreads();
  for (int index = threadIdx.x; index < kTokens * (kOutputs / 8); index += kProjectThreads) {
    const int t = index / (kOutputs / 8), chunk = index % (kOutputs / 8);
    const int64_t n = output + chunk * 8;
    if (token + t >= args.num_tokens || n >= args.out_features) continue;
    const int64_t slot = args.list.slot(token + t);
    *reinterpret_cast<uint4*>(args.kv + slot * args.out_features + n) =
        *reinterpret_cast<const uint4*>(tile + t * kPitch + chunk * 8);
  }
}

template <class Class>
__global__ void __launch_bounds__(kProjectThreads)
    project_kernel(const __grid_constant__ ProjectArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  let_dependents_start();
  constexpr int kTokens = Class::kTokens, kDepth = Class::kDepth, kStages = Class::kStages;
  constexpr int kWeightBytes = Class::kWeightBytes, kStageBytes = Class::kStageBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Token tiles vary fastest, so that the weights of an output tile are read from DRAM once.
  const int64_t token_tiles = (args.num_tokens + kTokens - 1) / kTokens;
  const int64_t token = blockIdx.x % token_tiles * kTokens;
  const int64_t output = blockIdx.x / token_tiles * kOutputs;
  const uint32_t base = shared_address(shared);
  const int num_steps = static_cast<int>((args.in_features + kDepth - 1) / kDepth);

  auto fetch_weights = [&](int step) {
    if (step < num_steps)
      copy_tile<kOutputs, kDepth>(base + step % kStages * kStageBytes, args.wkv, output,
                                  args.out_features, static_cast<int64_t>(step) * kDepth,
                                  args.in_features);
  };
  auto fetch_tokens = [&](int step) {
    if (step < num_steps)
      copy_tile<kTokens, kDepth>(base + step % kStages * kStageBytes + kWeightBytes, args.rows,
                                 token, args.num_tokens, static_cast<int64_t>(step) * kDepth,
                                 args.in_features);
    asm volatile("cp.async.commit_group;");
  };

  float sums[kTokens / 8][4] = {};
  // The weights of the first stages are on their way while the rows are still being gathered.
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) fetch_weights(step);
  await_prerequisites();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) fetch_tokens(step);
  for (int step = 0; step < num_steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();  // the stage is here, and everybody is done with the one refilled next
    fetch_weights(step + kStages - 1);
    fetch_tokens(step + kStages - 1);
    const uint32_t stage = base + step % kStages * kStageBytes;
    multiply_stage<kTokens, kDepth>(sums, stage, stage + kWeightBytes, warp, lane);
  }
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  store_tile<kTokens>(args, sums, reinterpret_cast<__nv_bfloat16*>(shared), output, token);
}

template <class Class>
engram_status launch_project(const ProjectArgs& args, cudaStream_t stream) {
  const auto kernel = project_kernel<Class>;
  ENGRAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   Class::kSharedBytes));
  const int64_t blocks = ((args.num_tokens + Class::kTokens - 1) / Class::kTokens) *
                         ((args.out_features + kOutputs - 1) / kOutputs);
  ENGRAM_REQUIRE(blocks <= 0x7FFFFFFF, "project: %lld tokens are too many for one launch",
                 static_cast<long long>(args.num_tokens));
  ENGRAM_CUDA(launch_dependent(kernel, static_cast<unsigned>(blocks), kProjectThreads,
                               Class::kSharedBytes, stream, args));
  return ENGRAM_OK;
}

struct ScatterArgs {
  const uint4* from;
  uint4* kv;
  int64_t vectors;  // of 16 bytes, a token
  SlotList list;
};

// One block a token, 16 bytes a thread.
__global__ void __launch_bounds__(256) scatter_kernel(const __grid_constant__ ScatterArgs args) {
  const int64_t token = blockIdx.x;
  const int64_t slot = args.list.slot(token);
  for (int64_t i = threadIdx.x; i < args.vectors; i += blockDim.x)
    args.kv[slot * args.vectors + i] = args.from[token * args.vectors + i];
}

}  // namespace engram

engram_status engram_project_chain(const engram_project_params* params) {
  using namespace engram;
  ENGRAM_REQUIRE(params->in_features > 0 && params->in_features % 8 == 0,
                 "project: expected in_features in multiples of 8, got %lld",
                 static_cast<long long>(params->in_features));
  ENGRAM_REQUIRE(params->out_features > 0 && params->out_features % 8 == 0,
                 "project: expected out_features in multiples of 8, got %lld",
                 static_cast<long long>(params->out_features));
  ENGRAM_REQUIRE(params->num_tokens >= 0, "project: expected num_tokens >= 0, got %lld",
                 static_cast<long long>(params->num_tokens));
  if (params->num_tokens == 0) return ENGRAM_OK;
  ProjectArgs args{};
  args.rows = static_cast<const __nv_bfloat16*>(params->rows);
  args.wkv = static_cast<const __nv_bfloat16*>(params->wkv);
  args.kv = static_cast<__nv_bfloat16*>(params->kv);
  args.num_tokens = params->num_tokens;
  args.in_features = params->in_features;
  args.out_features = params->out_features;
  fill_slot_list(args.list, params->slots, nullptr, params->num_tokens,
                 params->slots_on_device != 0);
  const cudaStream_t stream = static_cast<cudaStream_t>(params->stream);
  if (args.num_tokens <= 8) return launch_project<ChainClass<8, 128, 3>>(args, stream);
  if (args.num_tokens <= 16) return launch_project<ChainClass<16, 64, 4>>(args, stream);
  if (args.num_tokens <= 32) return launch_project<ChainClass<32, 64, 4>>(args, stream);
  return launch_project<ChainClass<64, 64, 4>>(args, stream);
}

engram_status engram_scatter_kv(const engram_scatter_params* params) {
  ENGRAM_REQUIRE(
      params->num_tokens >= 0 && params->out_features > 0 && params->out_features % 8 == 0,
      "scatter_kv: expected num_tokens >= 0 and out_features in multiples of 8, got "
      "%lld and %lld",
      static_cast<long long>(params->num_tokens), static_cast<long long>(params->out_features));
  ENGRAM_REQUIRE(params->slots != nullptr, "scatter_kv: expected slots, got NULL");
  if (params->num_tokens == 0) return ENGRAM_OK;
  engram::ScatterArgs args{};
  args.from = static_cast<const uint4*>(params->from);
  args.kv = static_cast<uint4*>(params->kv);
  args.vectors = params->out_features / 8;
  engram::fill_slot_list(args.list, params->slots, nullptr, params->num_tokens,
                         params->slots_on_device != 0);
  engram::scatter_kernel<<<static_cast<unsigned>(params->num_tokens), 256, 0,
                           static_cast<cudaStream_t>(params->stream)>>>(args);
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

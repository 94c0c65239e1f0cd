// The projection over wkv as stored, T <= 64: the chain's bits from a half or a sixth of its bytes.
//
//   kv[slot[t], n] = bf16(sum over k of bf16(dequantise(wkv[n, k])) * rows[t, k])
//
// One f32 accumulator a value in mma.sync.m16n8k16, k ascending by 16, as in project.cu; only the
// way of the weights differs. A warp owns one or two tiles of 16 outputs and all tokens; it reads
// its weights from end to end, 16 bytes a lane, a stage (256 k) or more ahead, straight into
// registers (formats/arranged.h), and makes the A registers there. The tokens of a stage go through
// shared memory once a block: the tiles are dealt evenly to as many blocks as there are
// multiprocessors, so that the rows cross L2 once a multiprocessor instead of once in 64 outputs.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../engram.h"
#include "../status.h"
#include "dependent.cuh"
#include "mma.cuh"
#include "project_stored.cuh"
#include "stored_streams.cuh"

namespace engram {

constexpr int kTokenBytes = kStageValues * 2;  // of one token in a stage

// 16-byte chunk of a token in a stage, swizzled so that ldmatrix is free of bank conflicts.
__device__ __forceinline__ uint32_t token_chunk(uint32_t stage, int token, int chunk) {
  return stage + token * kTokenBytes + ((chunk ^ (token & 7)) << 4);
}

// A warp a token: 512 contiguous bytes. Tokens behind the last are zeros.
template <int kTokens>
__device__ __forceinline__ void copy_tokens(const StoredArgs& args, uint32_t stage, int64_t k,
                                            int warp, int lane) {
  for (int token = warp; token < kTokens; token += blockDim.x / 32) {
    const bool is_inside = token < args.num_tokens;
    const __nv_bfloat16* from = args.rows + (is_inside ? token * args.in_features + k : 0);
    copy_chunk(token_chunk(stage, token, lane), from + lane * 8, is_inside);
  }
}

// 32 of k for the warp's outputs and all tokens.
template <int kUnit, int kTokens, int kTiles, class Stream>
__device__ __forceinline__ void multiply_unit(float (&sums)[kTiles][kTokens / 8][4],
                                              Stream (&streams)[kTiles], uint32_t tokens,
                                              bool has_next, int lane) {
  uint32_t a[kTiles][2][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) streams[tile].template decode<kUnit>(a[tile], has_next);
#pragma unroll
  for (int n = 0; n < kTokens / 8; ++n) {
    uint32_t b[4];  // 8 tokens
    load_matrices(b, token_chunk(tokens, n * 8 + lane % 8, kUnit * 4 + lane / 8));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      multiply(sums[tile][n], a[tile][0], b[0], b[1]);
      multiply(sums[tile][n], a[tile][1], b[2], b[3]);
    }
  }
}

// Tokens of a batch class; stages in shared memory; the most tiles of a warp and warps of a block;
// blocks a multiprocessor.
template <int kTokensOf, int kStagesOf, int kTilesOf, int kWarpsOf, int kBlocksOf>
struct Class {
  static constexpr int kTokens = kTokensOf, kStages = kStagesOf, kTiles = kTilesOf;
  static constexpr int kWarps = kWarpsOf, kBlocks = kBlocksOf;
  static constexpr int kStageBytes = kTokens * kTokenBytes;
  static constexpr int kPartBytes = output_bytes(kTokens, kTiles);  // of a warp
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kWarps* kPartBytes ? kStages * kStageBytes : kWarps * kPartBytes;
  static_assert(kSharedBytes <= 99 * 1024, "devices of compute capability 12 have 99 KB a block");
};

// The whole way of a warp with kTiles tiles from `first_tile` on; without work it only helps to
// copy tokens. Warps of a block may be in different instances: they meet at the same barrier.
template <class Stream, class Class, int kTiles>
__device__ __forceinline__ void project_tiles(const StoredArgs& args, uint8_t* shared,
                                              int64_t first_tile, bool has_work, int warp,
                                              int lane) {
  constexpr int kTokens = Class::kTokens, kStages = Class::kStages;
  const uint32_t base = shared_address(shared);
  const int num_stages = static_cast<int>(args.in_features / kStageValues);

  auto fetch_tokens = [&](int stage) {
    if (stage < num_stages)
      copy_tokens<kTokens>(args, base + stage % kStages * Class::kStageBytes,
                           static_cast<int64_t>(stage) * kStageValues, warp, lane);
    asm volatile("cp.async.commit_group;");
  };

  Stream streams[kTiles];
  float sums[kTiles][kTokens / 8][4] = {};
  // The first weights are on their way while the rows are still being gathered.
  if (has_work)
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) streams[tile].start(args, first_tile + tile, lane, 0);
  await_prerequisites();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch_tokens(stage);
  for (int first = 0; first < num_stages; first += Stream::kAhead)
#pragma unroll
    for (int turn = 0; turn < Stream::kAhead; ++turn) {
      const int stage = first + turn;
      if (stage >= num_stages) break;
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
      __syncthreads();  // the stage is here, and everybody is done with the one refilled next
      fetch_tokens(stage + kStages - 1);
      if (!has_work) continue;
      const uint32_t tokens = base + stage % kStages * Class::kStageBytes;
      const bool has_next = stage + Stream::kAhead < num_stages;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) streams[tile].begin_stage(turn, has_next);
      multiply_unit<0, kTokens>(sums, streams, tokens, has_next, lane);
      multiply_unit<1, kTokens>(sums, streams, tokens, has_next, lane);
      multiply_unit<2, kTokens>(sums, streams, tokens, has_next, lane);
      multiply_unit<3, kTokens>(sums, streams, tokens, has_next, lane);
      multiply_unit<4, kTokens>(sums, streams, tokens, has_next, lane);
      multiply_unit<5, kTokens>(sums, streams, tokens, has_next, lane);
      multiply_unit<6, kTokens>(sums, streams, tokens, has_next, lane);
      multiply_unit<7, kTokens>(sums, streams, tokens, has_next, lane);
    }
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  if (has_work)
    store_outputs<kTokens, kTiles>(args, sums, shared + warp * Class::kPartBytes,
                                   first_tile * kTileOutputs, lane);
}

template <class Stream, class Class>
__global__ void __launch_bounds__(Class::kWarps * 32, Class::kBlocks)
    project_stored_kernel(const __grid_constant__ StoredArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  let_dependents_start();
  // The compiler does not know that threadIdx.x / 32 is the same all over a warp.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = threadIdx.x % 32, warps = static_cast<int>(blockDim.x / 32);
  const int64_t tiles = args.out_features / kTileOutputs;
  const int64_t begin = blockIdx.x * tiles / gridDim.x;
  const int count = static_cast<int>((blockIdx.x + 1) * tiles / gridDim.x - begin);
  // The first warps take one more: with eight warps each quarter of a multiprocessor gets two,
  // and of twelve tiles three.
  const int mine = count / warps + (warp < count % warps);
  const int64_t first = begin + warp * (count / warps) + min(warp, count % warps);
  if constexpr (Class::kTiles == 2)
    if (mine == 2) return project_tiles<Stream, Class, 2>(args, shared, first, true, warp, lane);
  project_tiles<Stream, Class, 1>(args, shared, first, mine > 0, warp, lane);
}

template <class Stream, class Class>
engram_status launch_stored(const StoredArgs& args, int num_sms, cudaStream_t stream) {
  const auto kernel = project_stored_kernel<Stream, Class>;
  ENGRAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   Class::kSharedBytes));
  // Every block gets floor or ceil of its share of the tiles: at most kTiles a warp.
  constexpr int kBlockTiles = Class::kTiles * Class::kWarps;
  const int64_t tiles = args.out_features / kTileOutputs;
  const int64_t in_one_go = static_cast<int64_t>(num_sms) * Class::kBlocks * kBlockTiles;
  const int64_t wanted = (tiles + in_one_go - 1) / in_one_go * num_sms * Class::kBlocks;
  const int64_t blocks = wanted < tiles ? wanted : tiles;
  const int64_t most = (tiles + blocks - 1) / blocks;
  const int64_t warps = most < Class::kWarps ? most : Class::kWarps;
  ENGRAM_CUDA(launch_dependent(kernel, static_cast<unsigned>(blocks),
                               static_cast<unsigned>(warps * 32), Class::kSharedBytes, stream,
                               args));
  return ENGRAM_OK;
}

// Up to 16 tokens FP8 waits for its bytes, and two blocks a multiprocessor do not wait for each
// other at barriers (42.2 us instead of 43.5); Q2_K computes, and is better off with one (39.8
// instead of 42.8). From 32 tokens on a warp with two tiles reads each token once for both, where
// the registers suffice.
template <class UpTo8, class UpTo16, class More, int kBlocks, int kTiles = 2>
engram_status launch_class(const StoredArgs& args, int num_sms, cudaStream_t stream) {
  constexpr int kWarps = 16 / kBlocks, kManyWarps = kTiles == 2 ? 8 : 16;
  if (args.num_tokens <= 8)
    return launch_stored<UpTo8, Class<8, 4, 1, kWarps, kBlocks>>(args, num_sms, stream);
  if (args.num_tokens <= 16)
    return launch_stored<UpTo16, Class<16, 4, 1, kWarps, kBlocks>>(args, num_sms, stream);
  if (args.num_tokens <= 32)
    return launch_stored<More, Class<32, 4, kTiles, kManyWarps, 1>>(args, num_sms, stream);
  return launch_stored<More, Class<64, 3, kTiles, kTiles == 2 ? 8 : 12, 1>>(args, num_sms, stream);
}

engram_status launch_mma(int32_t format, const StoredArgs& args, int num_sms, cudaStream_t stream) {
  using FP8 = RegisterStream<E4M3Decoder>;
  using FP8Late = RegisterStream<E4M3Decoder, 1, kUnits, true>;
  using Q2 = RegisterStream<Q2KDecoder<ByShuffle>>;
  using Q2Ahead = RegisterStream<Q2KDecoder<ByShuffle>, 2>;
  using Q3 = RegisterStream<Q3KDecoder<ByShuffle>>;
  using Q4 = RegisterStream<Q4KDecoder<ByShuffle>, 1, kUnits, true>;
  using Q8 = RegisterStream<Q80Decoder, 1, 6, true>;
  switch (format) {
    case ENGRAM_Q2_K:
      return launch_class<Q2Ahead, Q2Ahead, Q2, 1>(args, num_sms, stream);
    case ENGRAM_Q3_K:
      return launch_class<Q3, Q3, Q3, 1, 1>(args, num_sms, stream);
    case ENGRAM_Q4_K:
      return launch_class<Q4, Q4, Q4, 1, 1>(args, num_sms, stream);
    case ENGRAM_Q8_0:
      return launch_class<Q8, Q8, Q8, 1, 1>(args, num_sms, stream);
    default:
      return launch_class<FP8Late, FP8, FP8, 2>(args, num_sms, stream);
  }
}

}  // namespace engram

engram_status engram_project_stored(const engram_project_stored_params* params) {
  using namespace engram;
  const engram_project_params& project = params->project;
  ENGRAM_REQUIRE(arranged_bytes(params->format, project.out_features, project.in_features) > 0,
                 "project_stored: expected Q8_0, Q2_K, Q3_K, Q4_K or E4M3_E8M0_32, outputs in "
                 "multiples of 32 and inputs of 256, got format %d, %lld x %lld",
                 params->format, static_cast<long long>(project.out_features),
                 static_cast<long long>(project.in_features));
  ENGRAM_REQUIRE(project.num_tokens >= 0 && project.num_tokens <= ENGRAM_INLINE_TOKENS,
                 "project_stored: expected num_tokens 0..%d, got %lld", ENGRAM_INLINE_TOKENS,
                 static_cast<long long>(project.num_tokens));
  if (project.num_tokens == 0) return ENGRAM_OK;
  StoredArgs args{};
  args.rows = static_cast<const __nv_bfloat16*>(project.rows);
  args.wkv = static_cast<const uint8_t*>(project.wkv);
  args.kv = static_cast<__nv_bfloat16*>(project.kv);
  args.num_tokens = project.num_tokens;
  args.in_features = project.in_features;
  args.out_features = project.out_features;
  fill_slot_list(args.list, project.slots, nullptr, project.num_tokens,
                 project.slots_on_device != 0);
  const cudaStream_t stream = static_cast<cudaStream_t>(project.stream);
  int device = 0, major = 0, minor = 0, num_sms = 0;
  ENGRAM_CUDA(cudaGetDevice(&device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  if (params->form != ENGRAM_STORED_WGMMA) return launch_mma(params->format, args, num_sms, stream);
  ENGRAM_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0)
    return fail(ENGRAM_UNSUPPORTED,
                "project_stored: form WGMMA needs compute capability 9.0, this device has %d.%d",
                major, minor);
  if (decode_takes(args)) return launch_decode(params->format, args, num_sms, stream);
  return launch_wgmma(params->format, args, num_sms, stream);
}

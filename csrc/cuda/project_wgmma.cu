// The projection over wkv as stored on Hopper, 9 to 64 tokens (fewer: project_decode.cu): wgmma
// with the decoded weights as the register operand. The same bits as project_stored.cu (one f32
// accumulator a value, k ascending).
//
// A block is three warpgroups of four tiles each, one tile a warp, and a warp that brings the
// tokens of a stage (256 k) into a ring in shared memory. Every warp brings its weights itself
// (shared_streams.cuh). Tiles that are over when every warpgroup of every multiprocessor has its
// four (16 of 1600 on 132 multiprocessors) go one to a block: a fourth warpgroup decodes a quarter
// of their k each warp into shared memory, and multiplies from there by wgmma, of whose 64 rows the
// tile is 16. So a quarter of a multiprocessor has 3 or 3.25 tiles to decode, instead of 3 or 4.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../engram.h"
#include "../status.h"
#include "barriers.cuh"
#include "dependent.cuh"
#include "mma.cuh"
#include "project_stored.cuh"
#include "shared_streams.cuh"
#include "stored_streams.cuh"
#include "wgmma.cuh"

namespace engram {

constexpr int kUnitGroups = 3;  // warpgroups with four tiles each
constexpr int kTileWarps = kUnitGroups * 4;
constexpr int kSourceWarp = kTileWarps + 4;  // brings the tokens
constexpr int kWgmmaThreads = (kSourceWarp + 1) * 32;
constexpr int kTileBytes = kTileOutputs * kStageValues * 2;  // of a tile and stage, decoded
constexpr int kRowBytes = 128;                               // of a token in shared memory: 64 k

struct WgmmaArgs {
  CUtensorMap tokens;  // rows [T, K] as [K / 64, T, 64]
  StoredArgs stored;
  int64_t num_units;  // of four tiles, dealt evenly to the blocks, at most three each
  int64_t num_left;   // tiles behind them, one a block
};

// kRing stages of tokens in shared memory.
template <int kTokensOf, int kRingOf, int kStageBytes, int kExchangeBytes>
struct WgmmaClass {
  static constexpr int kTokens = kTokensOf, kRing = kRingOf, kGroups = kTokens / 8;
  static constexpr int kTokenBytes = kTokens * kStageValues * 2;  // of one stage
  static constexpr int kPieceBytes = kTokens * kRowBytes;
  static constexpr int kFragmentsAt = kRing * kTokenBytes;
  static constexpr int kExchangeAt = kFragmentsAt + 2 * kTileBytes;
  static constexpr int kWeightsAt = kExchangeAt + kSourceWarp * kExchangeBytes;
  // Stages of weights, a tile: one is read while the other is on its way. Where three fit they are
  // slower, by up to 2 us.
  static constexpr int kSlots = 2;
  static constexpr int kBarriersAt = kWeightsAt + (kTileWarps + 1) * kSlots * kStageBytes;
  static constexpr int kBarriers = 2 * kRing + (kTileWarps + 1) * kSlots;
  static constexpr int kSharedBytes = kBarriersAt + kBarriers * 8 + 1024;  // aligned by hand
  static_assert(kSharedBytes <= 227 * 1024, "a block of compute capability 9.0 has 227 KB");
  static constexpr int kOutputBytes = output_bytes(kTokens, 1);  // of a warp
  static_assert((kTileWarps + 1) * kOutputBytes <= kFragmentsAt, "outputs re-use the ring");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where 16 of k begin in a stage of tokens, in the 16 bytes that descriptors count.
template <class Class>
__device__ constexpr int step_offset(int unit, int step) {
  return (unit / 2 * Class::kPieceBytes + (unit % 2 * 2 + step) * 32) / 16;
}

// The ring of tokens as a warp goes round it.
template <class Class>
struct Ring {
  uint32_t tokens, full, empty;
  int slot = 0;
  uint32_t parity = 0;

  // Returns where the stage lies.
  __device__ __forceinline__ uint32_t wait() const {
    barrier_wait(full + slot * 8, parity);
    return tokens + slot * Class::kTokenBytes;
  }

  // The warp has read the stage before.
  __device__ __forceinline__ void leave_previous(bool is_there, int lane) const {
    barrier_arrive_if(is_there && lane == 0, empty + (slot > 0 ? slot : Class::kRing) * 8 - 8);
  }

  __device__ __forceinline__ void advance() {
    ++slot;
    if (slot == Class::kRing) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// 32 of k: the warpgroup's four tiles and all tokens. `a` holds the registers of this unit and of
// the one before, which pending steps may still read.
template <int kUnit, class Class, class Stream>
__device__ __forceinline__ void multiply_unit(float (&sums)[Class::kGroups][4],
                                              uint32_t (&a)[2][2][4], Stream& stream,
                                              uint32_t tokens) {
  constexpr int kTurn = kUnit % 2;
  if constexpr (kUnit + 1 < kUnits) stream.template load<kUnit + 1>();
  stream.template decode<kUnit>(a[kTurn]);
  hold(a[kTurn]);
  wgmma_fence();
  const uint32_t word = descriptor_word(tokens);
#pragma unroll
  for (int step = 0; step < 2; ++step)
    multiply_async(sums, a[kTurn][step], descriptor(word + step_offset<Class>(kUnit, step)));
  wgmma_commit();
  wgmma_wait<1>();
  hold(a[1 - kTurn]);
}

// A warp of a warpgroup with work: one tile from beginning to end of k.
template <class Stream, class Class, class Weights>
__device__ __forceinline__ void multiply_tile(float (&sums)[Class::kGroups][4], Ring<Class> ring,
                                              Weights& weights, Stream& stream, int num_stages,
                                              int lane) {
  uint32_t a[2][2][4] = {};
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage) {
    stream.begin(weights.wait());
    stream.template load<0>();
    const uint32_t tokens = ring.wait();
    multiply_unit<0, Class>(sums, a, stream, tokens);
    // The last step of the stage before is done now.
    ring.leave_previous(stage > 0, lane);
    multiply_unit<1, Class>(sums, a, stream, tokens);
    multiply_unit<2, Class>(sums, a, stream, tokens);
    multiply_unit<3, Class>(sums, a, stream, tokens);
    multiply_unit<4, Class>(sums, a, stream, tokens);
    multiply_unit<5, Class>(sums, a, stream, tokens);
    multiply_unit<6, Class>(sums, a, stream, tokens);
    multiply_unit<7, Class>(sums, a, stream, tokens);
    __syncwarp();
    weights.leave(lane == 0);
    ring.advance();
  }
  wgmma_wait<0>();
  hold(sums);
}

// One thread brings all tokens.
template <class Class>
__device__ __forceinline__ void bring_tokens(const CUtensorMap& map, Ring<Class> ring,
                                             int num_stages) {
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage) {
    if (stage >= Class::kRing) barrier_wait(ring.empty + ring.slot * 8, ring.parity ^ 1);
    const uint32_t full = ring.full + ring.slot * 8;
    barrier_expect(full, Class::kTokenBytes);
    copy_box(ring.tokens + ring.slot * Class::kTokenBytes, &map, stage * (kStageValues / 64), full);
    ring.advance();
  }
}

// Two units of a tile that is over, into shared memory as tile_descriptor has them.
template <int kFirst, class Stream>
__device__ __forceinline__ void decode_quarter(Stream& stream, uint32_t fragments, int lane) {
  uint32_t a[2][2][4];
  stream.template load<kFirst, true>();
  stream.template load<kFirst + 1, true>();
  stream.template decode<kFirst>(a[0]);
  stream.template decode<kFirst + 1>(a[1]);
  hold(a[0]);
  hold(a[1]);
  asm volatile("bar.sync 2, 128;" ::: "memory");  // nobody reads this half any more
#pragma unroll
  for (int i = 0; i < 16; ++i)
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(fragments + kFirst * 1024 + i * 128 + lane * 4),
                 "r"(a[i / 8][i / 4 % 2][i % 4])
                 : "memory");
}

// The fourth warpgroup: a tile that is over. Returns with its sums in the first warp.
template <class Stream, class Class, class Weights>
__device__ __forceinline__ void multiply_left(float (&sums)[Class::kGroups][4], Ring<Class> ring,
                                              Weights& weights, Stream& stream, uint32_t fragments,
                                              int num_stages, int warp, int lane) {
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage) {
    const uint32_t half = fragments + stage % 2 * kTileBytes;
    stream.begin(weights.wait());
    if (warp == 0) decode_quarter<0>(stream, half, lane);
    if (warp == 1) decode_quarter<2>(stream, half, lane);
    if (warp == 2) decode_quarter<4>(stream, half, lane);
    if (warp == 3) decode_quarter<6>(stream, half, lane);
    publish_to_wgmma();
    asm volatile("bar.sync 1, 128;" ::: "memory");  // the stage is decoded
    const uint32_t tokens = ring.wait();
    wgmma_fence();
    const uint32_t word = descriptor_word(tokens);
    const uint64_t tile = tile_descriptor(half);
#pragma unroll
    for (int i = 0; i < 2 * kUnits; ++i)
      multiply_async(sums, tile + i * (512 / 16),
                     descriptor(word + step_offset<Class>(i / 2, i % 2)));
    wgmma_commit();
    weights.leave(warp == 0 && lane == 0);
    wgmma_wait<1>();
    ring.leave_previous(stage > 0, lane);
    ring.advance();
  }
  wgmma_wait<0>();
  hold(sums);
}

#endif

template <class Stream, class Class>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    project_wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  let_dependents_start();
  extern __shared__ __align__(1024) uint8_t unaligned[];
  uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const uint32_t base = shared_address(shared);
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = threadIdx.x % 32;
  const int64_t begin = blockIdx.x * args.num_units / gridDim.x;
  const int units = static_cast<int>((blockIdx.x + 1) * args.num_units / gridDim.x - begin);
  const bool has_left = blockIdx.x < args.num_left, is_left = warp >= kTileWarps;
  const bool has_work = is_left ? has_left && warp < kSourceWarp : warp / 4 < units;
  const int64_t tile =
      is_left ? args.num_units * 4 + blockIdx.x : (begin + warp / 4) * 4 + warp % 4;
  const int num_stages = static_cast<int>(args.stored.in_features / kStageValues);
  const uint32_t weight_barriers = base + Class::kBarriersAt + 2 * Class::kRing * 8;
  const Ring<Class> ring{base, base + Class::kBarriersAt,
                         base + Class::kBarriersAt + Class::kRing * 8};
  const int readers = (units + has_left) * 4;  // warps
  for (int i = threadIdx.x; i < Class::kBarriers; i += kWgmmaThreads) {
    const bool is_empty = i >= Class::kRing && i < 2 * Class::kRing;
    barrier_init(base + Class::kBarriersAt + i * 8, is_empty && readers > 0 ? readers : 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  // The first weights are on their way while the rows are still being gathered.
  TileRing<typename Stream::Decoder::Arranged, Class::kSlots> weights;
  Stream stream;
  if (has_work) {
    const int place = (is_left ? kTileWarps : warp) * Class::kSlots;
    weights.start(args.stored, tile, base + Class::kWeightsAt + place * Stream::kStageBytes,
                  weight_barriers + place * 8, lane == 0 && warp <= kTileWarps);
    stream.start(args.stored, tile, lane,
                 base + Class::kExchangeAt + warp * Stream::kExchangeBytes);
  }
  float sums[1][Class::kGroups][4] = {};
  if (warp == kSourceWarp) {
    if (lane == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(&args.tokens) : "memory");
    await_prerequisites();
    if (lane == 0 && readers > 0) bring_tokens<Class>(args.tokens, ring, num_stages);
    __syncwarp();
  } else if (has_work && is_left) {
    multiply_left<Stream, Class>(sums[0], ring, weights, stream, base + Class::kFragmentsAt,
                                 num_stages, warp - kTileWarps, lane);
  } else if (has_work) {
    multiply_tile<Stream, Class>(sums[0], ring, weights, stream, num_stages, lane);
  }
  await_prerequisites();
  __syncthreads();  // nobody reads tokens any more
  if (has_work && warp <= kTileWarps)
    store_outputs<Class::kTokens, 1>(args.stored, sums, shared + warp * Class::kOutputBytes,
                                     tile * kTileOutputs, lane);
#endif
}

// Rows in boxes of a stage: four pieces of 64 k of kTokens tokens, swizzled as wgmma takes them;
// zeros behind the last token.
template <int kTokens>
engram_status describe_tokens(const StoredArgs& stored, CUtensorMap& map) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                                12000, cudaEnableDefault, &result);
    return status == cudaSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found)
                                 : nullptr;
  }();
  if (encode == nullptr)
    return fail(ENGRAM_UNSUPPORTED, "project_stored: this driver makes no tensor maps");
  const cuuint64_t sizes[] = {64, static_cast<cuuint64_t>(stored.num_tokens),
                              static_cast<cuuint64_t>(stored.in_features / 64)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stored.in_features) * 2, kRowBytes};
  const cuuint32_t box[] = {64, kTokens, kStageValues / 64}, steps[] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<__nv_bfloat16*>(stored.rows),
             sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return fail(ENGRAM_CUDA_ERROR, "cuTensorMapEncodeTiled failed: %d", static_cast<int>(result));
  return ENGRAM_OK;
}

template <class Stream, int kTokens, int kRing>
engram_status launch_wgmma_class(WgmmaArgs& args, unsigned blocks, cudaStream_t stream) {
  using Class = WgmmaClass<kTokens, kRing, Stream::kStageBytes, Stream::kExchangeBytes>;
  const auto kernel = project_wgmma_kernel<Stream, Class>;
  if (const engram_status status = describe_tokens<kTokens>(args.stored, args.tokens))
    return status;
  ENGRAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   Class::kSharedBytes));
  ENGRAM_CUDA(launch_dependent(kernel, blocks, kWgmmaThreads, Class::kSharedBytes, stream, args));
  return ENGRAM_OK;
}

// Every block the same number of warpgroups and one tile that is over, where that is possible.
template <class Stream>
engram_status launch_format(const StoredArgs& stored, int num_sms, cudaStream_t stream) {
  const int64_t tiles = stored.out_features / kTileOutputs;
  const int64_t each = tiles / 4 / num_sms < kUnitGroups ? tiles / 4 / num_sms : kUnitGroups;
  int64_t blocks = num_sms;
  WgmmaArgs args{{}, stored, each * num_sms, tiles - each * num_sms * 4};
  if (each == 0 || args.num_left > num_sms) {
    args.num_units = tiles / 4;
    args.num_left = tiles % 4;
    blocks = (args.num_units + kUnitGroups - 1) / kUnitGroups;
    if (blocks < num_sms) blocks = args.num_units < num_sms ? args.num_units : num_sms;
    if (blocks < args.num_left) blocks = args.num_left;
  }
  const unsigned grid = static_cast<unsigned>(blocks);
  if (stored.num_tokens <= 16) return launch_wgmma_class<Stream, 16, 4>(args, grid, stream);
  if (stored.num_tokens <= 32) return launch_wgmma_class<Stream, 32, 3>(args, grid, stream);
  return launch_wgmma_class<Stream, 64, 3>(args, grid, stream);
}

using FP8Stream = SharedStream<E4M3Decoder>;
using Q2Stream = SharedStream<Q2KDecoder<BySharedMemory>>;
using Q3Stream = SharedStream<Q3KDecoder<BySharedMemory>>;
using Q4Stream = SharedStream<Q4KDecoder<BySharedMemory>>;
using Q8Stream = SharedStream<Q80Decoder>;

engram_status launch_wgmma(int32_t format, const StoredArgs& args, int num_sms,
                           cudaStream_t stream) {
  switch (format) {
    case ENGRAM_Q2_K:
      return launch_format<Q2Stream>(args, num_sms, stream);
    case ENGRAM_Q3_K:
      return launch_format<Q3Stream>(args, num_sms, stream);
    case ENGRAM_Q4_K:
      return launch_format<Q4Stream>(args, num_sms, stream);
    case ENGRAM_Q8_0:
      return launch_format<Q8Stream>(args, num_sms, stream);
    default:
      return launch_format<FP8Stream>(args, num_sms, stream);
  }
}

}  // namespace engram

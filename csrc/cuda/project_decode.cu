// The projection over wkv as stored on Hopper, T <= 8: the time is the decoding of the weights.
//
// A warp owns a tile of 16 outputs, twelve tiles a block, and multiplies by mma.sync; k ascends in
// one accumulator a value: the bits are the chain's. Nothing but that is left to these warps: four
// more have the tokens copied into shared memory once.
//
// A tile that is over when every multiprocessor has its twelve (16 of 1600 on 132) is decoded by
// those four: each decodes a quarter of every stage (256 k) ahead of its turn; in its turn it takes
// over the accumulators from the one before, multiplies its quarter and hands them on through
// shared memory.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../engram.h"
#include "../status.h"
#include "barriers.cuh"
#include "dependent.cuh"
#include "mma.cuh"
#include "project_stored.cuh"
#include "stored_streams.cuh"

namespace engram {

constexpr int kMainTiles = 12, kLeftWarps = 4;
constexpr int kDecodeThreads = (kMainTiles + kLeftWarps) * 32;
constexpr int kSumBytes = 512;  // accumulators of a tile

struct DecodeArgs {
  StoredArgs stored;
  int64_t num_main;  // tiles dealt evenly to the blocks, at most twelve each
  int64_t num_left;  // tiles behind them, one a block
};

// Shared memory: accumulators, exchange, barriers (turns, then one a quarter of the tokens' k),
// tokens, whose odd chunk keeps ldmatrix free of bank conflicts.
template <class Stream>
struct DecodeLayout {
  static constexpr int kExchangeAt = kSumBytes;
  static constexpr int kTurnsAt = kExchangeAt + (kMainTiles + kLeftWarps) * Stream::kExchangeBytes;
  static constexpr int kArrivedAt = kTurnsAt + kLeftWarps * 8;

  static constexpr int kTokensAt = kArrivedAt + kLeftWarps * 8;
  static_assert(kTokensAt % 16 == 0, "bulk copies and ldmatrix take 16 bytes");

  __host__ __device__ static constexpr int pitch(int num_stages) {
    return num_stages * kStageValues * 2 + 16;
  }
  static constexpr int bytes(int num_stages) { return kTokensAt + 8 * pitch(num_stages); }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile, and what its warp reads beside the weights.
template <class Stream>
struct TileWarp {
  using Layout = DecodeLayout<Stream>;
  uint32_t arrived, tokens;
  int num_stages, piece, next_piece;  // stages in a quarter of the tokens' k; where one begins
  Stream stream;
  float sums[4];

  __device__ __forceinline__ TileWarp(const StoredArgs& args, uint32_t base, int64_t tile,
                                      uint32_t exchange, bool is_alone, int lane) {
    num_stages = static_cast<int>(args.in_features / kStageValues);
    piece = (num_stages + kLeftWarps - 1) / kLeftWarps;
    next_piece = 0;
    arrived = base + Layout::kArrivedAt;
    tokens = base + Layout::kTokensAt + lane % 8 * Layout::pitch(num_stages) + lane / 8 * 16;
    stream.start(args, tile, lane, exchange, is_alone);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
  }

  // Of each stage in turn.
  __device__ __forceinline__ void await_tokens(int stage) {
    if (stage != next_piece) return;
    barrier_wait(arrived, 0);
    arrived += 8;
    next_piece += piece;
  }

  // 8 tokens, 32 of k. What lies where there is no token is multiplied for nobody.
  __device__ __forceinline__ void load_tokens(uint32_t (&b)[4], int stage, int unit) const {
    load_matrices(b, tokens + (stage * kUnits + unit) * (kUnitValues * 2));
  }

  __device__ __forceinline__ void multiply_unit(const uint32_t (&a)[2][4], const uint32_t (&b)[4]) {
    multiply(sums, a[0], b[0], b[1]);
    multiply(sums, a[1], b[2], b[3]);
  }

  template <int kUnit>
  __device__ __forceinline__ void unit(int stage, bool has_next) {
    uint32_t a[2][4], b[4];
    load_tokens(b, stage, kUnit);
    stream.template decode<kUnit>(a, has_next);
    multiply_unit(a, b);
  }

  __device__ __forceinline__ void store(const StoredArgs& args, int64_t tile, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = lane % 4 * 2 + i % 2;
      if (t < args.num_tokens)
        args.kv[args.list.slot(t) * args.out_features + tile * kTileOutputs + lane / 4 +
                i / 2 * 8] = __float2bfloat16_rn(sums[i]);
    }
  }
};

// A warp with a tile of its own.
template <class Stream>
__device__ __forceinline__ void multiply_whole(TileWarp<Stream>& warp) {
  for (int first = 0; first < warp.num_stages; first += Stream::kAhead)
#pragma unroll
    for (int turn = 0; turn < Stream::kAhead; ++turn) {
      const int stage = first + turn;
      if (stage >= warp.num_stages) break;
      const bool has_next = stage + Stream::kAhead < warp.num_stages;
      warp.stream.begin_stage(turn, has_next);
      warp.await_tokens(stage);
      warp.template unit<0>(stage, has_next);
      warp.template unit<1>(stage, has_next);
      warp.template unit<2>(stage, has_next);
      warp.template unit<3>(stage, has_next);
      warp.template unit<4>(stage, has_next);
      warp.template unit<5>(stage, has_next);
      warp.template unit<6>(stage, has_next);
      warp.template unit<7>(stage, has_next);
    }
}

// One of four warps that share a tile.
template <int kPart, class Stream>
__device__ __forceinline__ void multiply_quarter(TileWarp<Stream>& warp, uint32_t base, int lane) {
  const uint32_t turns = base + DecodeLayout<Stream>::kTurnsAt, handed = base + lane * 16;
  for (int first = 0; first < warp.num_stages; first += Stream::kAhead)
#pragma unroll
    for (int turn = 0; turn < Stream::kAhead; ++turn) {
      const int stage = first + turn;
      if (stage >= warp.num_stages) break;
      const bool has_next = stage + Stream::kAhead < warp.num_stages;
      uint32_t a[2][2][4], b[2][4];
      warp.stream.begin_stage(turn, has_next);
      warp.stream.template decode<kPart * 2, true>(a[0], has_next);
      warp.stream.template decode<kPart * 2 + 1, true>(a[1], has_next);
      warp.await_tokens(stage);
      warp.load_tokens(b[0], stage, kPart * 2);
      warp.load_tokens(b[1], stage, kPart * 2 + 1);
      if (kPart > 0 || stage > 0) {
        barrier_wait(turns + kPart * 8, (kPart > 0 ? stage : stage - 1) & 1);
        const uint4 sums = SharedBytes{handed}.load16(0);
        warp.sums[0] = __uint_as_float(sums.x), warp.sums[1] = __uint_as_float(sums.y);
        warp.sums[2] = __uint_as_float(sums.z), warp.sums[3] = __uint_as_float(sums.w);
      }
      warp.multiply_unit(a[0], b[0]);
      warp.multiply_unit(a[1], b[1]);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(handed), "f"(warp.sums[0]),
                   "f"(warp.sums[1]), "f"(warp.sums[2]), "f"(warp.sums[3])
                   : "memory");
      __syncwarp();  // every lane has read the exchange, whose half the next stage writes again
      barrier_arrive(turns + (kPart + 1) % kLeftWarps * 8);
    }
}

// By each of the four warps: a quarter of k of every token.
template <class Stream>
__device__ __forceinline__ void copy_tokens(const StoredArgs& args, uint32_t base, int part,
                                            int lane) {
  using Layout = DecodeLayout<Stream>;
  const int num_stages = static_cast<int>(args.in_features / kStageValues);
  const int piece = (num_stages + kLeftWarps - 1) / kLeftWarps;
  const int tokens = static_cast<int>(args.num_tokens), first = part * piece;
  if (first >= num_stages) return;
  const uint32_t bytes = min(piece, num_stages - first) * kStageValues * 2;
  const uint32_t barrier = base + Layout::kArrivedAt + part * 8;
  if (lane == 0) barrier_expect(barrier, tokens * bytes);
  __syncwarp();
  if (lane < tokens)
    copy_bulk(
        base + Layout::kTokensAt + lane * Layout::pitch(num_stages) + first * kStageValues * 2,
        args.rows + lane * args.in_features + first * kStageValues, bytes, barrier);
}

#endif

template <class Stream>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    project_decode_kernel(const __grid_constant__ DecodeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = DecodeLayout<Stream>;
  let_dependents_start();
  extern __shared__ __align__(128) uint8_t shared[];
  const StoredArgs& stored = args.stored;
  const uint32_t base = shared_address(shared);
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 2 * kLeftWarps)
    barrier_init(base + Layout::kTurnsAt + threadIdx.x * 8, threadIdx.x < kLeftWarps ? 32 : 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const int64_t begin = blockIdx.x * args.num_main / gridDim.x;
  const int tiles = static_cast<int>((blockIdx.x + 1) * args.num_main / gridDim.x - begin);
  const uint32_t exchange = base + Layout::kExchangeAt + warp * Stream::kExchangeBytes;
  if (warp < kMainTiles) {
    const bool has_tile = warp < tiles;
    TileWarp<Stream> mine(stored, base, begin + (has_tile ? warp : 0), exchange, false, lane);
    __syncthreads();  // the barriers are there; the first weights are on their way
    if (!has_tile) return;
    multiply_whole(mine);
    await_prerequisites();
    mine.store(stored, begin + warp, lane);
    return;
  }
  const int part = warp - kMainTiles;
  const int64_t tile = args.num_main + blockIdx.x;
  if (blockIdx.x >= args.num_left) {
    __syncthreads();
    await_prerequisites();
    copy_tokens<Stream>(stored, base, part, lane);
    return;
  }
  TileWarp<Stream> mine(stored, base, tile, exchange, true, lane);
  __syncthreads();
  await_prerequisites();
  copy_tokens<Stream>(stored, base, part, lane);
  if (part == 0) multiply_quarter<0>(mine, base, lane);
  if (part == 1) multiply_quarter<1>(mine, base, lane);
  if (part == 2) multiply_quarter<2>(mine, base, lane);
  if (part == 3) {
    multiply_quarter<3>(mine, base, lane);
    mine.store(stored, tile, lane);
  }
#endif
}

using FP8Stream = RegisterStream<E4M3Decoder>;
using Q2Stream = RegisterStream<Q2KDecoder<BySharedMemory>, 2>;
using Q3Stream = RegisterStream<Q3KDecoder<BySharedMemory>, 2>;
using Q4Stream = RegisterStream<Q4KDecoder<BySharedMemory>, 1, kUnits, true>;
using Q8Stream = RegisterStream<Q80Decoder, 1, 6>;

constexpr int kMostStages = 44;  // whose tokens fit into a block's 227 KB, whatever the exchange
static_assert(DecodeLayout<Q3Stream>::bytes(kMostStages) <= 227 * 1024,
              "a block of compute capability 9.0 has 227 KB");
static_assert(DecodeLayout<Q4Stream>::bytes(kMostStages) <= 227 * 1024,
              "a block of compute capability 9.0 has 227 KB");

bool decode_takes(const StoredArgs& args) {
  return args.num_tokens <= 8 && args.in_features <= kMostStages * kStageValues;
}

template <class Stream>
engram_status launch_decode_format(const StoredArgs& stored, int num_sms, cudaStream_t stream) {
  const int64_t tiles = stored.out_features / kTileOutputs;
  const int64_t each = tiles / num_sms < kMainTiles ? tiles / num_sms : kMainTiles;
  int64_t blocks = num_sms;
  DecodeArgs args{stored, each * num_sms, tiles - each * num_sms};
  if (each == 0 || args.num_left > num_sms) {
    args.num_main = tiles;
    args.num_left = 0;
    blocks = (tiles + kMainTiles - 1) / kMainTiles;
    if (blocks < num_sms) blocks = tiles < num_sms ? tiles : num_sms;
  }
  const int bytes =
      DecodeLayout<Stream>::bytes(static_cast<int>(stored.in_features / kStageValues));
  const auto kernel = project_decode_kernel<Stream>;
  ENGRAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  ENGRAM_CUDA(
      launch_dependent(kernel, static_cast<unsigned>(blocks), kDecodeThreads, bytes, stream, args));
  return ENGRAM_OK;
}

engram_status launch_decode(int32_t format, const StoredArgs& args, int num_sms,
                            cudaStream_t stream) {
  switch (format) {
    case ENGRAM_Q2_K:
      return launch_decode_format<Q2Stream>(args, num_sms, stream);
    case ENGRAM_Q3_K:
      return launch_decode_format<Q3Stream>(args, num_sms, stream);
    case ENGRAM_Q4_K:
      return launch_decode_format<Q4Stream>(args, num_sms, stream);
    case ENGRAM_Q8_0:
      return launch_decode_format<Q8Stream>(args, num_sms, stream);
    default:
      return launch_decode_format<FP8Stream>(args, num_sms, stream);
  }
}

}  // namespace engram

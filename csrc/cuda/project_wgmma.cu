// The projection over wkv as stored on Hopper, T <= 64: wgmma with the decoded weights as the
// register operand (up to 8 tokens mma.sync: its chain of steps is shorter, and no warp waits for
// three others). The same bits as project_stored.cu (one f32 accumulator a value, k ascending).
//
// A block is three warpgroups of four tiles each, one tile a warp, and a fourth warpgroup that
// brings the tokens of a stage (256 k) into a ring in shared memory. Tiles that are over when every
// warpgroup of every multiprocessor has its four (16 of 1600 on 132 multiprocessors) go one to a
// block: its fourth warpgroup decodes a quarter of their k each warp, hands the fragments round
// through shared memory and multiplies them by mma.sync, eight tokens a warp in turn. So a quarter
// of a multiprocessor has 3 or 3.25 tiles to decode, instead of 3 or 4.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../engram.h"
#include "../status.h"
#include "dependent.cuh"
#include "mma.cuh"
#include "project_stored.h"
#include "stored_streams.cuh"
#include "wgmma.cuh"

namespace engram {

constexpr int kUnitGroups = 3;  // warpgroups with four tiles each
constexpr int kWgmmaThreads = (kUnitGroups + 1) * 128;
constexpr int kFragmentBytes = kTileOutputs * kStageValues * 2;  // of one tile and stage

struct WgmmaArgs {
  StoredArgs stored;
  int64_t num_units;  // of four tiles, dealt evenly to the blocks, at most three each
  int64_t num_left;   // tiles behind them, one a block
};

// kRing stages of tokens in shared memory, of which kRing - 2 are on their way. kIsAsync: by wgmma;
// if not, by mma.sync, for which the four warps of a group need not wait for each other.
template <class Stream, int kTokensOf, int kRingOf, bool kIsAsyncOf>
struct WgmmaClass {
  static constexpr bool kIsAsync = kIsAsyncOf;
  static constexpr int kTokens = kTokensOf, kRing = kRingOf, kGroups = kTokens / 8;
  static constexpr int kTokenBytes = kTokens * kStageValues * 2;  // of one stage
  static constexpr int kFragmentsAt = kRing * kTokenBytes;
  static constexpr int kExchangeAt = kFragmentsAt + 2 * kFragmentBytes;
  static constexpr int kBarriersAt = kExchangeAt + kWgmmaThreads / 32 * Stream::kExchangeBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * kRing * 8 + 1024;  // aligned by hand
  static constexpr int kPitch = kTileOutputs + 8;
  static_assert(kSharedBytes <= 227 * 1024, "a block of compute capability 9.0 has 227 KB");
  static_assert(kUnitGroups * 4 * kTokens * kPitch * 2 <= kFragmentsAt, "outputs re-use the ring");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kRowBytes = 128;  // of a token: 64 k

template <int kTokens>
__device__ __forceinline__ uint32_t token_address(uint32_t stage, int token, int chunk) {
  return stage + chunk / 8 * (kTokens * kRowBytes) + token * kRowBytes +
         ((chunk % 8 ^ (token & 7)) << 4);
}

struct Ring {
  uint32_t tokens, full, empty;
};

// 32 of k: the warpgroup's four tiles and all tokens. `a` holds the registers of this unit and of
// the one before, which pending steps may still read.
template <int kUnit, class Class, class Stream>
__device__ __forceinline__ void multiply_unit(float (&sums)[Class::kGroups][4],
                                              uint32_t (&a)[2][2][4], Stream& stream,
                                              uint32_t tokens, bool has_next, int lane) {
  constexpr int kTurn = kUnit % 2;
  stream.template decode<kUnit>(a[kTurn], has_next);
  if constexpr (Class::kIsAsync) {
    hold(a[kTurn]);
    wgmma_fence();
    const uint32_t word = descriptor_word(tokens);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      constexpr int kChunk = Class::kTokens * kRowBytes;  // 64 k: two units
      const int at = kUnit / 2 * kChunk + (kUnit % 2 * 2 + step) * 32;
      multiply_async(sums, a[kTurn][step], descriptor(word + at / 16));
    }
    wgmma_commit();
    wgmma_wait<1>();
    hold(a[1 - kTurn]);
  } else {
#pragma unroll
    for (int n = 0; n < Class::kGroups; ++n) {
      uint32_t b[4];
      load_matrices(b, token_address<Class::kTokens>(tokens, n * 8 + lane % 8,
                                                     kUnit * 4 + lane / 8));
      multiply(sums[n], a[kTurn][0], b[0], b[1]);
      multiply(sums[n], a[kTurn][1], b[2], b[3]);
    }
  }
}

// A warp of a warpgroup with work: one tile from beginning to end of k.
template <class Stream, class Class>
__device__ __forceinline__ void multiply_tile(const StoredArgs& args,
                                              float (&sums)[Class::kGroups][4], const Ring& ring,
                                              uint32_t exchange, int64_t tile, int lane) {
  constexpr int kRing = Class::kRing;
  const int num_stages = static_cast<int>(args.in_features / kStageValues);
  Stream stream;
  stream.start(args, tile, lane, exchange);
  uint32_t a[2][2][4] = {};
  for (int first = 0; first < num_stages; first += Stream::kAhead)
#pragma unroll
    for (int turn = 0; turn < Stream::kAhead; ++turn) {
      const int stage = first + turn;
      if (stage >= num_stages) break;
      const bool has_next = stage + Stream::kAhead < num_stages;
      stream.begin_stage(turn, has_next);
      barrier_wait(ring.full + stage % kRing * 8, stage / kRing % 2);
      const uint32_t tokens = ring.tokens + stage % kRing * Class::kTokenBytes;
      multiply_unit<0, Class>(sums, a, stream, tokens, has_next, lane);
      // The last step of the stage before is done now, of every lane.
      if (!Class::kIsAsync) __syncwarp();
      if (stage > 0 && lane == 0) barrier_arrive(ring.empty + (stage - 1) % kRing * 8);
      multiply_unit<1, Class>(sums, a, stream, tokens, has_next, lane);
      multiply_unit<2, Class>(sums, a, stream, tokens, has_next, lane);
      multiply_unit<3, Class>(sums, a, stream, tokens, has_next, lane);
      multiply_unit<4, Class>(sums, a, stream, tokens, has_next, lane);
      multiply_unit<5, Class>(sums, a, stream, tokens, has_next, lane);
      multiply_unit<6, Class>(sums, a, stream, tokens, has_next, lane);
      multiply_unit<7, Class>(sums, a, stream, tokens, has_next, lane);
    }
  if (Class::kIsAsync) wgmma_wait<0>();
  hold(sums);
}

// One stage of the tokens, by the fourth warpgroup: a warp a token, 512 contiguous bytes.
template <class Class>
__device__ __forceinline__ void fetch_tokens(const StoredArgs& args, uint32_t to, int64_t k,
                                             int warp, int lane) {
#pragma unroll
  for (int token = warp; token < Class::kTokens; token += 4) {
    const bool is_inside = token < args.num_tokens;
    const __nv_bfloat16* from = args.rows + (is_inside ? token * args.in_features + k : 0);
    copy_chunk(token_address<Class::kTokens>(to, token, lane), from + lane * 8, is_inside);
  }
}

// Two units of a tile that is over: their fragments to shared memory.
template <int kFirst, class Stream>
__device__ __forceinline__ void decode_quarter(Stream& stream, uint32_t fragments, bool has_next,
                                               int lane) {
  uint32_t a[2][2][4];
  stream.template decode<kFirst, true>(a[0], has_next);
  stream.template decode<kFirst + 1, true>(a[1], has_next);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t(&r)[4] = a[step / 2][step % 2];
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(fragments +
                                                                 (kFirst * 2 + step) * 512 +
                                                                 lane * 16),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

// A unit of a tile that is over, and the warp's tokens (groups warp and warp + 4) of 32 k.
template <class Class>
struct SharedUnit {
  static constexpr int kMine = (Class::kGroups + 3) / 4;
  uint32_t a[2][4], b[kMine][4];

  __device__ __forceinline__ void load(uint32_t fragments, uint32_t tokens, int unit, int warp,
                                       int lane) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a[step][0]), "=r"(a[step][1]), "=r"(a[step][2]), "=r"(a[step][3])
                   : "r"(fragments + (unit * 2 + step) * 512 + lane * 16));
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      load_matrices(b[i], token_address<Class::kTokens>(tokens, (warp + 4 * i) * 8 + lane % 8,
                                                        unit * 4 + lane / 8));
  }
};

// One stage of a tile that is over by mma.sync, each unit loaded while the one before multiplies.
template <class Class>
__device__ __forceinline__ void multiply_shared(float (&sums)[2][4], uint32_t fragments,
                                                uint32_t tokens, int warp, int lane) {
  if (warp >= Class::kGroups) return;
  SharedUnit<Class> units[2];
  units[0].load(fragments, tokens, 0, warp, lane);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit + 1 < kUnits) units[(unit + 1) % 2].load(fragments, tokens, unit + 1, warp, lane);
    const SharedUnit<Class>& now = units[unit % 2];
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int i = 0; i < SharedUnit<Class>::kMine; ++i)
        multiply(sums[i], now.a[step], now.b[i][step * 2], now.b[i][step * 2 + 1]);
  }
}

// The fourth warpgroup: tokens for everybody, and a tile that is over. Returns with sums[i] of
// tokens 8 * (warp + 4 * i).
template <class Stream, class Class>
__device__ __forceinline__ void serve_tokens(const StoredArgs& args, float (&sums)[2][4],
                                             const Ring& ring, uint32_t fragments,
                                             uint32_t exchange, int64_t tile, bool has_tile,
                                             bool has_readers, int warp, int lane) {
  constexpr int kRing = Class::kRing, kOnTheWay = kRing - 2;
  const int num_stages = static_cast<int>(args.in_features / kStageValues);
  Stream stream;
  if (has_tile) stream.start(args, tile, lane, exchange, true);
  await_prerequisites();
  auto fetch = [&](int stage) {
    if (stage < num_stages) {
      if (stage >= kRing && has_readers)
        barrier_wait(ring.empty + stage % kRing * 8, (stage / kRing - 1) % 2);
      fetch_tokens<Class>(args, ring.tokens + stage % kRing * Class::kTokenBytes,
                          static_cast<int64_t>(stage) * kStageValues, warp, lane);
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll 1
  for (int stage = 0; stage < kOnTheWay; ++stage) fetch(stage);
  for (int first = 0; first < num_stages; first += Stream::kAhead)
#pragma unroll
    for (int turn = 0; turn < Stream::kAhead; ++turn) {
      const int stage = first + turn;
      if (stage >= num_stages) break;
      fetch(stage + kOnTheWay);
      asm volatile("cp.async.wait_group %0;" ::"n"(kOnTheWay));
      publish_to_wgmma();
      barrier_arrive(ring.full + stage % kRing * 8);
      if (!has_tile) continue;
      const bool has_next = stage + Stream::kAhead < num_stages;
      const uint32_t half = fragments + stage % 2 * kFragmentBytes;
      stream.begin_stage(turn, has_next);
      if (warp == 0) decode_quarter<0>(stream, half, has_next, lane);
      if (warp == 1) decode_quarter<2>(stream, half, has_next, lane);
      if (warp == 2) decode_quarter<4>(stream, half, has_next, lane);
      if (warp == 3) decode_quarter<6>(stream, half, has_next, lane);
      asm volatile("bar.sync 1, 128;" ::: "memory");  // fragments and tokens of the stage are here
      multiply_shared<Class>(sums, half, ring.tokens + stage % kRing * Class::kTokenBytes, warp,
                             lane);
    }
  asm volatile("cp.async.wait_group 0;");
}

// Eight tokens of a tile straight from the accumulators.
__device__ __forceinline__ void store_group(const StoredArgs& args, const float (&sums)[4],
                                            int64_t tile, int group, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = group * 8 + lane % 4 * 2 + i % 2;
    if (token >= args.num_tokens) continue;
    args.kv[args.list.slot(token) * args.out_features + tile * kTileOutputs + lane / 4 +
            i / 2 * 8] = __float2bfloat16_rn(sums[i]);
  }
}

// A warp's tile: accumulators -> its part of shared memory [token][output] -> 16-byte stores.
template <class Class>
__device__ __forceinline__ void store_tile(const StoredArgs& args,
                                           const float (&sums)[Class::kGroups][4],
                                           __nv_bfloat16* part, int64_t tile, int lane) {
#pragma unroll
  for (int n = 0; n < Class::kGroups; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      part[(n * 8 + lane % 4 * 2 + i % 2) * Class::kPitch + lane / 4 + i / 2 * 8] =
          __float2bfloat16_rn(sums[n][i]);
  __syncwarp();
  for (int i = lane; i < Class::kTokens * 2; i += 32) {
    const int token = i / 2, chunk = i % 2;
    if (token >= args.num_tokens) break;
    *reinterpret_cast<uint4*>(args.kv + args.list.slot(token) * args.out_features +
                              tile * kTileOutputs + chunk * 8) =
        *reinterpret_cast<const uint4*>(part + token * Class::kPitch + chunk * 8);
  }
}

#endif

template <class Stream, class Class>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    project_wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t unaligned[];
  uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const uint32_t base = shared_address(shared);
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = threadIdx.x % 32;
  const int64_t begin = blockIdx.x * args.num_units / gridDim.x;
  const int units = static_cast<int>((blockIdx.x + 1) * args.num_units / gridDim.x - begin);
  const Ring ring{base, base + Class::kBarriersAt, base + Class::kBarriersAt + Class::kRing * 8};
  const uint32_t exchange = base + Class::kExchangeAt + warp * Stream::kExchangeBytes;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < Class::kRing; ++i) {
      barrier_init(ring.full + i * 8, 128);
      barrier_init(ring.empty + i * 8, units > 0 ? units * 4 : 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp < kUnitGroups * 4) {
    const bool has_work = warp / 4 < units;
    const int64_t tile = (begin + warp / 4) * 4 + warp % 4;
    float sums[Class::kGroups][4] = {};
    if (has_work) multiply_tile<Stream, Class>(args.stored, sums, ring, exchange, tile, lane);
    await_prerequisites();
    __syncthreads();  // nobody reads tokens any more
    if (has_work)
      store_tile<Class>(args.stored, sums,
                        reinterpret_cast<__nv_bfloat16*>(shared) +
                            warp * Class::kTokens * Class::kPitch,
                        tile, lane);
  } else {
    const int mine = warp - kUnitGroups * 4;
    const bool has_tile = blockIdx.x < args.num_left;
    const int64_t tile = args.num_units * 4 + blockIdx.x;
    float sums[2][4] = {};
    serve_tokens<Stream, Class>(args.stored, sums, ring, base + Class::kFragmentsAt, exchange, tile,
                                has_tile, units > 0, mine, lane);
    __syncthreads();
    if (!has_tile) return;
#pragma unroll
    for (int i = 0; i < (Class::kGroups + 3) / 4; ++i)
      if (mine + 4 * i < Class::kGroups)
        store_group(args.stored, sums[i], tile, mine + 4 * i, lane);
  }
#endif
}

template <class Stream, class Class>
engram_status launch_wgmma_class(const WgmmaArgs& args, unsigned blocks, cudaStream_t stream) {
  const auto kernel = project_wgmma_kernel<Stream, Class>;
  ENGRAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   Class::kSharedBytes));
  ENGRAM_CUDA(launch_dependent(kernel, blocks, kWgmmaThreads, Class::kSharedBytes, stream, args));
  return ENGRAM_OK;
}

// Every block the same number of warpgroups and one tile that is over, where that is possible.
template <class Few, class Many>
engram_status launch_format(const StoredArgs& stored, int num_sms, cudaStream_t stream) {
  const int64_t tiles = stored.out_features / kTileOutputs;
  const int64_t each = tiles / 4 / num_sms < kUnitGroups ? tiles / 4 / num_sms : kUnitGroups;
  int64_t blocks = num_sms;
  WgmmaArgs args{stored, each * num_sms, tiles - each * num_sms * 4};
  if (each == 0 || args.num_left > num_sms) {
    args.num_units = tiles / 4;
    args.num_left = tiles % 4;
    blocks = (args.num_units + kUnitGroups - 1) / kUnitGroups;
    if (blocks < num_sms) blocks = args.num_units < num_sms ? args.num_units : num_sms;
    if (blocks < args.num_left) blocks = args.num_left;
  }
  const unsigned grid = static_cast<unsigned>(blocks);
  if (stored.num_tokens <= 8)
    return launch_wgmma_class<Few, WgmmaClass<Few, 8, 8, false>>(args, grid, stream);
  if (stored.num_tokens <= 16)
    return launch_wgmma_class<Few, WgmmaClass<Few, 16, 8, true>>(args, grid, stream);
  if (stored.num_tokens <= 32)
    return launch_wgmma_class<Many, WgmmaClass<Many, 32, 4, true>>(args, grid, stream);
  return launch_wgmma_class<Many, WgmmaClass<Many, 64, 4, true>>(args, grid, stream);
}

engram_status launch_wgmma(int32_t format, const StoredArgs& args, cudaStream_t stream) {
  int device = 0, major = 0, minor = 0, num_sms = 0;
  ENGRAM_CUDA(cudaGetDevice(&device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  if (major != 9 || minor != 0)
    return fail(ENGRAM_UNSUPPORTED,
                "project_stored: wgmma needs compute capability 9.0, this device has %d.%d", major,
                minor);
  using Q2 = Q2KStream<2, BySharedMemory>;
  using Q2One = Q2KStream<1, BySharedMemory>;
  using Q3 = Q3KStream<2, BySharedMemory>;
  using Q3One = Q3KStream<1, BySharedMemory>;
  using Q4 = Q4KStream<BySharedMemory>;
  switch (format) {
    case ENGRAM_Q2_K:
      return launch_format<Q2, Q2One>(args, num_sms, stream);
    case ENGRAM_Q3_K:
      return launch_format<Q3, Q3One>(args, num_sms, stream);
    case ENGRAM_Q4_K:
      return launch_format<Q4, Q4>(args, num_sms, stream);
    case ENGRAM_Q8_0:
      return launch_format<Q80Stream, Q80Stream>(args, num_sms, stream);
    default:
      return launch_format<E4M3Stream, E4M3Stream>(args, num_sms, stream);
  }
}

}  // namespace engram

// The gate: residual, keys and value -> residual + gate * value, per (token, stream c).
//
//   s = sum(h*w*key) * rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps) * dim^-1/2
//   out = rn(h + rn(sigmoid(copysign(sqrt(max(|s|, 1e-6)), s)) * value)),  dead: out = h
//
// A block owns one (token, stream) at a time; a thread owns kVectors vectors of kWidth consecutive
// values, 16 bytes of residual each. The order of every sum depends on dim alone, so a token's
// result does not depend on T. Maxima keep NaN, the last two operations are never contracted.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../status.h"
#include "dependent.cuh"
#include "slots.cuh"
#include "vector.cuh"

namespace engram {

constexpr int kMaxDim = 8192;
constexpr int kSmallDim = 1024;  // one vector a thread

constexpr int max_dim(int vectors) { return vectors == 1 ? kSmallDim : kMaxDim; }

struct GateArgs {
  const void* kv;
  const float4* qk;
  const void* residual;
  void* out;
  int64_t num_tokens;
  int32_t dim, hc_mult;
  float eps, inverse_dim, inverse_root_dim;
  const engram_descriptor* descriptor;  // of a captured launch
  SlotList list;
};

// kOnce: a block owns one token. kStays: it walks over tokens of its stream, with q*k (20 KB a
// stream) in registers; better for many tokens. kCaptured: it walks, and what it reads and writes,
// over the link as a rule, is said by the descriptor.
enum class Mode { kOnce, kStays, kCaptured };

// 16 bytes of residual and the bf16 beside them. They stay packed until they are used.
template <bool kIsF32>
struct Vector;

template <>
struct Vector<false> {
  static constexpr int kWidth = 8;
  using Residual = uint4;
  using Kv = uint4;
  __device__ static void unpack_residual(const uint4& packed, float (&y)[8]) {
    unpack_bf16(packed, y);
  }
  __device__ static void unpack_kv(const uint4& packed, float (&y)[8]) { unpack_bf16(packed, y); }
  __device__ static uint4 pack(const float (&y)[8]) { return pack_bf16(y); }
};

template <>
struct Vector<true> {
  static constexpr int kWidth = 4;  // whole sectors a warp, in the residual and in kv
  using Residual = float4;
  using Kv = uint2;
  __device__ static void unpack_residual(const float4& packed, float (&y)[4]) {
    y[0] = packed.x, y[1] = packed.y, y[2] = packed.z, y[3] = packed.w;
  }
  __device__ static void unpack_kv(const uint2& packed, float (&y)[4]) {
    y[0] = __uint_as_float(packed.x << 16), y[1] = __uint_as_float(packed.x & 0xFFFF0000u);
    y[2] = __uint_as_float(packed.y << 16), y[3] = __uint_as_float(packed.y & 0xFFFF0000u);
  }
  __device__ static float4 pack(const float (&y)[4]) { return {y[0], y[1], y[2], y[3]}; }
};

// Hides where the bits come from: otherwise the compiler carries the unpacked values over the
// reduction, twice the registers of the packed ones (107 against 64, half the occupancy).
__device__ __forceinline__ void opaque(uint4& packed) {
  asm volatile("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
}

__device__ __forceinline__ void opaque(uint2& packed) {
  asm volatile("" : "+r"(packed.x), "+r"(packed.y));
}

__device__ __forceinline__ void opaque(float4&) {}

template <int kWidth>
__device__ __forceinline__ void load_weights(const float4* qk, int64_t vector, float (&w)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; i += 4) {
    const float4 four = __ldg(qk + vector * (kWidth / 4) + i / 4);
    w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
  }
}

struct Sums {
  float h_square, key_square, dot;
};

struct BlockSums {
  float4 parts[32];
  float gate;
};

__device__ __forceinline__ void sum_over_warp(Sums& sums) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sums.h_square += __shfl_xor_sync(0xFFFFFFFFu, sums.h_square, step);
    sums.key_square += __shfl_xor_sync(0xFFFFFFFFu, sums.key_square, step);
    sums.dot += __shfl_xor_sync(0xFFFFFFFFu, sums.dot, step);
  }
}

__device__ __forceinline__ float gate_of(const Sums& sums, const GateArgs& args) {
  const float h_mean = __fmul_rn(sums.h_square, args.inverse_dim);
  const float key_mean = __fmul_rn(sums.key_square, args.inverse_dim);
  // One product of two roots: the product of the means would underflow at eps^2 = 1e-40.
  const float rstd =
      __fmul_rn(rsqrtf(__fadd_rn(h_mean, args.eps)), rsqrtf(__fadd_rn(key_mean, args.eps)));
  const float s = __fmul_rn(__fmul_rn(sums.dot, rstd), args.inverse_root_dim);
  const float magnitude = fabsf(s);
  const float clamped = magnitude < 1e-6f ? 1e-6f : magnitude;  // NaN stays NaN
  const float root = copysignf(__fsqrt_rn(clamped), s);
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-root)));
}

// The first warp finishes the sums and the gate for all: every warp doing so cost as many
// instructions as the values themselves.
__device__ __forceinline__ float gate_of_block(Sums mine, const GateArgs& args, BlockSums& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  sum_over_warp(mine);
  if (lane == 0) shared.parts[warp] = {mine.h_square, mine.key_square, mine.dot, 0.0f};
  __syncthreads();
  if (warp == 0) {
    Sums total{0.0f, 0.0f, 0.0f};
    if (lane < static_cast<int>(blockDim.x) / 32) {
      const float4 part = shared.parts[lane];
      total = {part.x, part.y, part.z};
    }
    sum_over_warp(total);
    const float gate = gate_of(total, args);
    if (lane == 0) shared.gate = gate;
  }
  __syncthreads();
  return shared.gate;
}

template <int kWidth>
__device__ __forceinline__ void add_products(Sums& sums, const float (&h)[kWidth],
                                             const float (&key)[kWidth], const float (&w)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sums.h_square = __fmaf_rn(h[j], h[j], sums.h_square);
    sums.key_square = __fmaf_rn(key[j], key[j], sums.key_square);
    sums.dot = __fmaf_rn(__fmul_rn(h[j], w[j]), key[j], sums.dot);
  }
}

template <class Pointer>
__device__ __forceinline__ Pointer load_pointer(const Pointer* from) {
  return reinterpret_cast<Pointer>(__ldg(reinterpret_cast<const unsigned long long*>(from)));
}

template <bool kIsF32, int kVectors, Mode kMode>
__global__ void __launch_bounds__(max_dim(kVectors) / (kVectors * Vector<kIsF32>::kWidth))
    gate_kernel(const __grid_constant__ GateArgs args) {
  using V = Vector<kIsF32>;
  constexpr int kWidth = V::kWidth;
  constexpr bool kStays = kMode == Mode::kStays, kCaptured = kMode == Mode::kCaptured;
  constexpr bool kWalks = kStays || kCaptured;
  // Two sets in turn: a warp may start the next token while another still reads this one's gate.
  __shared__ BlockSums shared[kWalks ? 2 : 1];
  const int vectors = args.dim / kWidth, hc = args.hc_mult;
  const int stream = blockIdx.x % hc;
  const int64_t step = gridDim.x / hc;
  const int64_t first = static_cast<int64_t>(stream) * vectors;

  float w[kVectors][kWidth];
  auto load_all_weights = [&] {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * blockDim.x + threadIdx.x;
      if (vector < vectors) load_weights(args.qk, first + vector, w[i]);
    }
  };
  // Only the weights are nobody's result: the projection before may still be under way.
  constexpr bool kIsDependent = kMode == Mode::kOnce;
  if (kStays || kIsDependent) load_all_weights();
  if (kIsDependent) await_prerequisites();

  int turn = 0;
  int64_t token = blockIdx.x / hc, next_slot = 0;
  bool is_next_dead = false;
  const void* from = args.residual;
  void* to = args.out;
  const auto ask = [&](int64_t next) {
    next_slot = __ldg(args.descriptor->slots + next);
    is_next_dead = __ldg(args.descriptor->is_dead + next) != 0;
  };
  if constexpr (kCaptured) {
    // Over the link, all four at once.
    from = load_pointer(&args.descriptor->residual);
    to = load_pointer(&args.descriptor->out);
    ask(token);
  }
  for (; token < args.num_tokens; token += step) {
    const int64_t row = token * hc * vectors + first;
    int64_t slot;
    bool is_dead;
    if constexpr (kCaptured) {
      slot = next_slot;
      is_dead = is_next_dead;
      if (token + step < args.num_tokens) ask(token + step);
    } else {
      is_dead = args.list.dead(token);
      slot = is_dead ? 0 : args.list.slot(token);
    }
    const auto* residual = static_cast<const typename V::Residual*>(from) + row;
    auto* out = static_cast<typename V::Residual*>(to) + row;
    if (is_dead) {
      if (to != from)
        for (int vector = threadIdx.x; vector < vectors; vector += blockDim.x)
          out[vector] = residual[vector];
      if (!kWalks) return;
      continue;
    }
    const auto* kv = static_cast<const typename V::Kv*>(args.kv) + slot * (hc + 1) * vectors;
    typename V::Residual packed[kVectors];
    typename V::Kv key[kVectors], value[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * blockDim.x + threadIdx.x;
      if (vector >= vectors) continue;
      packed[i] = residual[vector];
      key[i] = kv[first + vector];
      value[i] = kv[static_cast<int64_t>(hc) * vectors + vector];
    }
    if (kCaptured) load_all_weights();

    Sums sums{0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x) >= vectors) continue;
      float h[kWidth], k[kWidth];
      V::unpack_residual(packed[i], h);
      V::unpack_kv(key[i], k);
      add_products(sums, h, k, w[i]);
    }
    const float gate = gate_of_block(sums, args, shared[turn]);
    if (kWalks) turn ^= 1;

#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * blockDim.x + threadIdx.x;
      if (vector >= vectors) continue;
      float h[kWidth], v[kWidth];
      opaque(packed[i]);
      opaque(value[i]);
      V::unpack_residual(packed[i], h);
      V::unpack_kv(value[i], v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) h[j] = __fadd_rn(h[j], __fmul_rn(gate, v[j]));
      out[vector] = V::pack(h);
    }
    if (!kWalks) return;
  }
}

// How many blocks that stay the device holds at once.
template <bool kIsF32, int kVectors>
engram_status resident_blocks(int threads, int64_t& blocks) {
  int device = 0, num_sms = 0, blocks_a_sm = 0;
  ENGRAM_CUDA(cudaGetDevice(&device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  ENGRAM_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks_a_sm, gate_kernel<kIsF32, kVectors, Mode::kStays>, threads, 0));
  blocks = static_cast<int64_t>(num_sms) * blocks_a_sm;
  return ENGRAM_OK;
}

// From here on blocks that stay are faster, bf16 only (measured: bf16 at 1024 tokens 33 against 34
// us; f32 at 8192 tokens 428 against 410, its q*k registers cost a block a multiprocessor).
constexpr int64_t kStayTokens = 512;

// So many tokens at a time over the link: with all 64 at once everything is read before anything is
// written, and the link works one way at a time (a hit at 64 tokens: 97 us, 107 all at once).
constexpr int64_t kLinkTokens = 8;

template <bool kIsF32, int kVectors>
engram_status launch_gate(const GateArgs& args, cudaStream_t stream) {
  const int vectors = args.dim / Vector<kIsF32>::kWidth;
  const int threads = ((vectors + kVectors - 1) / kVectors + 31) / 32 * 32;
  if (args.descriptor != nullptr) {
    const int64_t walkers = args.num_tokens < kLinkTokens ? args.num_tokens : kLinkTokens;
    gate_kernel<kIsF32, kVectors, Mode::kCaptured>
        <<<static_cast<unsigned>(walkers * args.hc_mult), threads, 0, stream>>>(args);
  } else if (kIsF32 || args.num_tokens <= kStayTokens) {
    ENGRAM_CUDA(launch_dependent(gate_kernel<kIsF32, kVectors, Mode::kOnce>,
                                 static_cast<unsigned>(args.num_tokens * args.hc_mult),
                                 static_cast<unsigned>(threads), 0, stream, args));
  } else if constexpr (!kIsF32) {
    int64_t blocks = 0;
    if (const engram_status status = resident_blocks<kIsF32, kVectors>(threads, blocks))
      return status;
    const int64_t walkers = blocks / args.hc_mult;
    const int64_t used = args.num_tokens < walkers ? args.num_tokens : walkers;
    gate_kernel<kIsF32, kVectors, Mode::kStays>
        <<<static_cast<unsigned>(used * args.hc_mult), threads, 0, stream>>>(args);
  }
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

// The number of vectors a thread holds follows from dim alone: it decides the order of the sums.
template <bool kIsF32>
engram_status dispatch_gate(const GateArgs& args, cudaStream_t stream) {
  if (args.dim <= kSmallDim) return launch_gate<kIsF32, 1>(args, stream);
  return launch_gate<kIsF32, kIsF32 ? 4 : 2>(args, stream);
}

static engram_status check_gate(const engram_gate_params& p) {
  ENGRAM_REQUIRE(p.hc_mult >= 1 && p.hc_mult <= 4, "gate: expected hc_mult 1..4, got %d",
                 p.hc_mult);
  ENGRAM_REQUIRE(p.dim > 0 && p.dim % 8 == 0 && p.dim <= kMaxDim,
                 "gate: expected dim in multiples of 8 up to %d, got %d", kMaxDim, p.dim);
  ENGRAM_REQUIRE(p.num_tokens >= 0 && p.num_tokens <= (1 << 28),
                 "gate: expected 0..2^28 tokens, got %lld", static_cast<long long>(p.num_tokens));
  ENGRAM_REQUIRE(p.descriptor == nullptr || p.num_tokens <= ENGRAM_INLINE_TOKENS,
                 "gate: a descriptor holds %d tokens, got %lld", ENGRAM_INLINE_TOKENS,
                 static_cast<long long>(p.num_tokens));
  ENGRAM_REQUIRE(p.eps >= 0.0f, "gate: expected eps >= 0, got %g", static_cast<double>(p.eps));
  return ENGRAM_OK;
}

}  // namespace engram

engram_status engram_gate(const engram_gate_params* params) {
  using namespace engram;
  if (const engram_status status = check_gate(*params)) return status;
  if (params->num_tokens == 0) return ENGRAM_OK;
  GateArgs args{};
  args.kv = params->kv;
  args.qk = reinterpret_cast<const float4*>(params->qk);
  args.residual = params->residual;
  args.out = params->out;
  args.num_tokens = params->num_tokens;
  args.dim = params->dim;
  args.hc_mult = params->hc_mult;
  args.eps = params->eps;
  args.inverse_dim = static_cast<float>(1.0 / params->dim);
  args.inverse_root_dim =
      static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(params->dim)));
  args.descriptor = params->descriptor;
  if (params->descriptor == nullptr)
    fill_slot_list(args.list, params->slots, params->is_dead, params->num_tokens);
  const cudaStream_t stream = static_cast<cudaStream_t>(params->stream);
  return params->is_f32 ? dispatch_gate<true>(args, stream) : dispatch_gate<false>(args, stream);
}

// The gate: residual, keys and value -> residual + gate * value, per (token, stream c).
//
//   s = sum(h*w*key) * rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps) * dim^-1/2
//   out = rn(h + rn(sigmoid(copysign(sqrt(max(|s|, 1e-6)), s)) * value)),  dead: out = h
//
// A block keeps one stream and walks over tokens, so that q*k (20 KB a stream, f32) is read once
// and stays in registers; a thread owns kVectors vectors of eight consecutive values. The order of
// every sum depends on dim alone, so a token's result does not depend on T. Maxima keep NaN, the
// last two operations are never contracted.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../status.h"
#include "slots.cuh"
#include "vector.cuh"

namespace engram {

constexpr int kMaxGateThreads = 512;
constexpr int kMaxGateWarps = kMaxGateThreads / 32;
// Two blocks of 512 leave 64 registers a thread, which sm_90a meets without a spill; others don't.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kGateBlocks = 2;
#else
constexpr int kGateBlocks = 1;
#endif

struct GateArgs {
  const uint4* kv;
  const float4* qk;
  const void* residual;
  void* out;
  int64_t num_tokens;
  int32_t dim, hc_mult;
  float eps, inverse_dim, inverse_root_dim;
  SlotList list;
};

// Hides where the bits come from: otherwise the compiler carries the unpacked values over the
// reduction, twice the registers of the packed ones (107 against 64, half the occupancy).
__device__ __forceinline__ void opaque(uint4& packed) {
  asm volatile("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
}

// Eight values of the residual, kept as they came: dead positions return their bits.
template <bool kIsF32>
struct Residual;

template <>
struct Residual<false> {
  uint4 packed;
  __device__ __forceinline__ void load(const void* base, int64_t vector) {
    packed = __ldcs(static_cast<const uint4*>(base) + vector);
  }
  __device__ __forceinline__ void unpack(float (&h)[8]) const { unpack_bf16(packed, h); }
  __device__ __forceinline__ void store(void* base, int64_t vector) const {
    __stcs(static_cast<uint4*>(base) + vector, packed);
  }
  __device__ __forceinline__ void pack(const float (&h)[8]) { packed = pack_bf16(h); }
  __device__ __forceinline__ void keep_packed() { opaque(packed); }
};

template <>
struct Residual<true> {
  float4 low, high;
  __device__ __forceinline__ void load(const void* base, int64_t vector) {
    low = __ldcs(static_cast<const float4*>(base) + 2 * vector);
    high = __ldcs(static_cast<const float4*>(base) + 2 * vector + 1);
  }
  __device__ __forceinline__ void unpack(float (&h)[8]) const {
    h[0] = low.x, h[1] = low.y, h[2] = low.z, h[3] = low.w;
    h[4] = high.x, h[5] = high.y, h[6] = high.z, h[7] = high.w;
  }
  __device__ __forceinline__ void store(void* base, int64_t vector) const {
    __stcs(static_cast<float4*>(base) + 2 * vector, low);
    __stcs(static_cast<float4*>(base) + 2 * vector + 1, high);
  }
  __device__ __forceinline__ void pack(const float (&h)[8]) {
    low = {h[0], h[1], h[2], h[3]};
    high = {h[4], h[5], h[6], h[7]};
  }
  __device__ __forceinline__ void keep_packed() {}
};

struct Sums {
  float h_square, key_square, dot;
};

__device__ __forceinline__ Sums sum_over_block(Sums mine, float4 (*parts)[kMaxGateWarps]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    mine.h_square += __shfl_xor_sync(0xFFFFFFFFu, mine.h_square, step);
    mine.key_square += __shfl_xor_sync(0xFFFFFFFFu, mine.key_square, step);
    mine.dot += __shfl_xor_sync(0xFFFFFFFFu, mine.dot, step);
  }
  if (threadIdx.x % 32 == 0)
    (*parts)[threadIdx.x / 32] = {mine.h_square, mine.key_square, mine.dot, 0.0f};
  __syncthreads();
  Sums total{0.0f, 0.0f, 0.0f};
  const int num_warps = blockDim.x / 32;
#pragma unroll 2
  for (int warp = 0; warp < num_warps; ++warp) {
    const float4 part = (*parts)[warp];
    total.h_square += part.x;
    total.key_square += part.y;
    total.dot += part.z;
  }
  return total;
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

template <bool kIsF32, int kVectors>
__global__ void __launch_bounds__(kMaxGateThreads, kGateBlocks)
    gate_kernel(const __grid_constant__ GateArgs args) {
  // Two sets in turn: a warp may start the next token while another still reads this one's.
  __shared__ float4 parts[2][kMaxGateWarps];
  const int vectors = args.dim / 8, hc = args.hc_mult;
  const int stream = blockIdx.x % hc;
  const int64_t step = gridDim.x / hc;

  float w[kVectors][8];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * blockDim.x + threadIdx.x;
    if (vector < vectors) {
      const float4 low = __ldg(args.qk + (static_cast<int64_t>(stream) * vectors + vector) * 2);
      const float4 high =
          __ldg(args.qk + (static_cast<int64_t>(stream) * vectors + vector) * 2 + 1);
      w[i][0] = low.x, w[i][1] = low.y, w[i][2] = low.z, w[i][3] = low.w;
      w[i][4] = high.x, w[i][5] = high.y, w[i][6] = high.z, w[i][7] = high.w;
    }
  }

  int turn = 0;
  for (int64_t token = blockIdx.x / hc; token < args.num_tokens; token += step, turn ^= 1) {
    const int64_t row = (token * hc + stream) * vectors;
    const bool is_dead = args.list.dead(token);
    if (is_dead && args.out == args.residual) continue;
    Residual<kIsF32> residual[kVectors];
    uint4 key[kVectors], value[kVectors];
    const int64_t base = is_dead ? 0 : args.list.slot(token) * (hc + 1) * vectors;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * blockDim.x + threadIdx.x;
      if (vector >= vectors) continue;
      residual[i].load(args.residual, row + vector);
      if (is_dead) continue;
      key[i] = __ldcs(args.kv + base + static_cast<int64_t>(stream) * vectors + vector);
      value[i] = __ldg(args.kv + base + static_cast<int64_t>(hc) * vectors + vector);
    }

    float gate = 0.0f;
    if (!is_dead) {
      Sums sums{0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x) >= vectors) continue;
        float h[8], k[8];
        residual[i].unpack(h);
        unpack_bf16(key[i], k);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sums.h_square = __fmaf_rn(h[j], h[j], sums.h_square);
          sums.key_square = __fmaf_rn(k[j], k[j], sums.key_square);
          sums.dot = __fmaf_rn(__fmul_rn(h[j], w[i][j]), k[j], sums.dot);
        }
      }
      gate = gate_of(sum_over_block(sums, &parts[turn]), args);
    }

#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * blockDim.x + threadIdx.x;
      if (vector >= vectors) continue;
      if (!is_dead) {
        float h[8], v[8];
        residual[i].keep_packed();
        opaque(value[i]);
        residual[i].unpack(h);
        unpack_bf16(value[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) h[j] = __fadd_rn(h[j], __fmul_rn(gate, v[j]));
        residual[i].pack(h);
      }
      residual[i].store(args.out, row + vector);
    }
  }
}

template <bool kIsF32, int kVectors>
engram_status launch_gate(const GateArgs& args, cudaStream_t stream) {
  const int vectors = args.dim / 8;
  const int threads = ((vectors + kVectors - 1) / kVectors + 31) / 32 * 32;
  int device = 0, num_sms = 0, blocks_a_sm = 0;
  ENGRAM_CUDA(cudaGetDevice(&device));
  ENGRAM_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  ENGRAM_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks_a_sm, gate_kernel<kIsF32, kVectors>, threads, 0));
  const int64_t resident = static_cast<int64_t>(num_sms) * blocks_a_sm / args.hc_mult;
  const int64_t walkers = args.num_tokens < resident ? args.num_tokens : resident;
  gate_kernel<kIsF32, kVectors>
      <<<static_cast<unsigned>(walkers * args.hc_mult), threads, 0, stream>>>(args);
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

// The number of vectors a thread holds follows from dim alone.
template <bool kIsF32>
engram_status dispatch_gate(const GateArgs& args, cudaStream_t stream) {
  const int vectors = args.dim / 8;
  if (vectors <= 256) return launch_gate<kIsF32, 1>(args, stream);
  return launch_gate<kIsF32, 2>(args, stream);
}

struct ReadArgs {
  const uint4* kv;
  uint4* out;
  int64_t num_tokens;
  int32_t vectors;      // of one key or value
  int32_t num_vectors;  // of one token
  SlotList list;
};

// One block a token and quarter; 16 bytes a thread.
__global__ void __launch_bounds__(256) read_kv_kernel(const __grid_constant__ ReadArgs args) {
  const int64_t token = blockIdx.x / 4;
  const int part = blockIdx.x % 4;
  const bool is_dead = args.list.dead(token);
  const int64_t base = is_dead ? 0 : args.list.slot(token) * args.num_vectors;
  for (int i = part * 256 + threadIdx.x; i < args.num_vectors; i += 1024) {
    uint4 data;
    if (is_dead) {
      const uint32_t zero = i < args.num_vectors - args.vectors ? 0u : 0x80008000u;
      data = {zero, zero, zero, zero};
    } else {
      data = __ldcs(args.kv + base + i);
    }
    __stcs(args.out + token * args.num_vectors + i, data);
  }
}

static engram_status check_sizes(const char* what, int64_t num_tokens, int32_t dim,
                                 int32_t hc_mult) {
  ENGRAM_REQUIRE(hc_mult >= 1 && hc_mult <= 4, "%s: expected hc_mult 1..4, got %d", what, hc_mult);
  ENGRAM_REQUIRE(dim > 0 && dim % 8 == 0 && dim <= 8192,
                 "%s: expected dim in multiples of 8 up to 8192, got %d", what, dim);
  ENGRAM_REQUIRE(num_tokens >= 0 && num_tokens <= (1 << 28),
                 "%s: expected 0..2^28 tokens, got %lld", what,
                 static_cast<long long>(num_tokens));
  return ENGRAM_OK;
}

}  // namespace engram

engram_status engram_gate(const engram_gate_params* params) {
  using namespace engram;
  if (const engram_status status =
          check_sizes("gate", params->num_tokens, params->dim, params->hc_mult))
    return status;
  ENGRAM_REQUIRE(params->eps >= 0.0f, "gate: expected eps >= 0, got %g",
                 static_cast<double>(params->eps));
  if (params->num_tokens == 0) return ENGRAM_OK;
  GateArgs args{};
  args.kv = static_cast<const uint4*>(params->kv);
  args.qk = reinterpret_cast<const float4*>(params->qk);
  args.residual = params->residual;
  args.out = params->out;
  args.num_tokens = params->num_tokens;
  args.dim = params->dim;
  args.hc_mult = params->hc_mult;
  args.eps = params->eps;
  args.inverse_dim = static_cast<float>(1.0 / params->dim);
  args.inverse_root_dim = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(params->dim)));
  fill_slot_list(args.list, params->slots, params->is_dead, params->num_tokens);
  const cudaStream_t stream = static_cast<cudaStream_t>(params->stream);
  return params->is_f32 ? dispatch_gate<true>(args, stream) : dispatch_gate<false>(args, stream);
}

engram_status engram_read_kv(const engram_read_kv_params* params) {
  using namespace engram;
  if (const engram_status status =
          check_sizes("read_kv", params->num_tokens, params->dim, params->hc_mult))
    return status;
  if (params->num_tokens == 0) return ENGRAM_OK;
  ReadArgs args{};
  args.kv = static_cast<const uint4*>(params->kv);
  args.out = static_cast<uint4*>(params->out);
  args.num_tokens = params->num_tokens;
  args.vectors = params->dim / 8;
  args.num_vectors = args.vectors * (params->hc_mult + 1);
  fill_slot_list(args.list, params->slots, params->is_dead, params->num_tokens);
  read_kv_kernel<<<static_cast<unsigned>(params->num_tokens * 4), 256, 0,
                   static_cast<cudaStream_t>(params->stream)>>>(args);
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

// windows or row ids -> rows: hash, gather and dequantise in one pass.
//
//   id[t, c]  = (w0*m0 ^ ... ^ w(n-1)*m(n-1)) mod prime[c] + offset[c],   n = c / num_heads + 2
//   out[t, c] = bf16(dequantise(table[id[t, c]]))                 [T, C, head_dim]
//
// One warp takes kRows consecutive (token, column) pairs: lane r hashes pair r, the ids go round by
// shuffle, then every lane holds eight values (16 bytes of output) of each row, all loads first.
#include <cuda_runtime.h>

#include "../formats/formats.h"
#include "../formats/requantize.h"
#include "../hash.h"
#include "../status.h"
#include "dependent.cuh"
#include "packed.cuh"
#include "vector.cuh"

namespace engram {

constexpr int kGatherThreads = 128;
constexpr int kGatherWarps = kGatherThreads / 32;

struct GatherArgs {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t code_stride, scale_stride;  // bytes from row to row
  const int32_t* windows;
  const int64_t* hash_ids;
  uint8_t* out;
  int64_t num_pairs;  // T * C
  int32_t num_cols, head_dim;
  bool requantized, is_inline;
  const int64_t* slots;  // a graph's: passed on to slots_out, or NULL
  int64_t* slots_out;
  int32_t num_slots;
  bool is_released_early;
  engram_hash hash;
  int32_t inline_windows[ENGRAM_INLINE_TOKENS * 4];
};

__device__ __forceinline__ int64_t row_id(const GatherArgs& args, int64_t pair) {
  if (args.hash_ids != nullptr) return args.hash_ids[pair];
  // 64-bit division is a call of some 100 instructions.
  const int64_t token = pair <= 0xFFFFFFFF
                            ? static_cast<uint32_t>(pair) / static_cast<uint32_t>(args.num_cols)
                            : pair / args.num_cols;
  const int col = static_cast<int>(pair - token * args.num_cols);
  const int64_t first = token * args.hash.max_ngram_size;
  // Indexed, not pointed at: the parameters are then read from the constant bank.
  if (args.is_inline)
    return hash_row_id(args.hash, [&](int i) { return args.inline_windows[first + i]; }, col);
  return hash_row_id(args.hash, [&](int i) { return __ldg(args.windows + first + i); }, col);
}

// Four lanes hold the 32 values of a quant group.
__device__ __forceinline__ void requantize_group(float (&y)[8], unsigned lanes) {
  float amax = 0.0f;
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    amax = fmaxf(amax, fabsf(y[i]));
    has_nan |= isnan(y[i]);
  }
  if (has_nan) amax = __uint_as_float(0x7FC00000u);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other = __shfl_xor_sync(lanes, amax, step);
    amax = isnan(amax) || isnan(other) ? __uint_as_float(0x7FC00000u) : fmaxf(amax, other);
  }
  const float scale = requantize_scale(amax);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = requantize(y[i], scale);
}

template <class Format, int kRows>
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ GatherArgs args) {
  if (args.is_released_early) let_dependents_start();
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kGatherWarps + threadIdx.x / 32;
  // One block fetches the slots over the link for the whole projection behind.
  if (args.slots != nullptr && blockIdx.x == 0 && threadIdx.x < args.num_slots)
    args.slots_out[threadIdx.x] = __ldg(args.slots + threadIdx.x);
  const int64_t first = warp * kRows;
  if (first >= args.num_pairs) return;
  const int64_t mine = min(first + lane % kRows, args.num_pairs - 1);
  const int64_t id = row_id(args, mine);

  const int num_groups = args.head_dim / 8;
  for (int base = 0; base < num_groups; base += 32) {
    const int group = base + lane;
    const bool is_live = group < num_groups;
    // A tail of the row leaves whole quads of lanes out: head_dim is a multiple of 32 when
    // requantized, so those four lanes agree.
    typename Format::Group raw[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = __shfl_sync(0xFFFFFFFFu, id, r);
      if (is_live)
        raw[r] = load_row_group<Format>(args.codes + row * args.code_stride,
                                        args.scales + row * args.scale_stride, group);
    }
    const unsigned lanes = __ballot_sync(0xFFFFFFFFu, is_live);
    if (!is_live) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= args.num_pairs) break;
      uint4 packed = decode_packed<Format>(raw[r], group);
      if (args.requantized) {
        float y[8];
        unpack_bf16(packed, y);
        requantize_group(y, lanes);
        packed = pack_bf16(y);
      }
      if (kRows == 1 && !args.is_released_early) let_dependents_start_after(packed.x);
      *reinterpret_cast<uint4*>(args.out + ((first + r) * num_groups + group) * 16) = packed;
    }
  }
}

// The bytes as stored, codes then scales. kUnit: the largest width every address is a multiple of.
template <class Unit>
__global__ void __launch_bounds__(kGatherThreads)
    gather_stored_kernel(const __grid_constant__ GatherArgs args, int code_units, int row_units,
                         const uint8_t* tail, int64_t tail_stride) {
  const int lane = threadIdx.x % 32;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kGatherWarps + threadIdx.x / 32;
  if (pair >= args.num_pairs) return;
  const int64_t id = row_id(args, pair);
  const Unit* codes = reinterpret_cast<const Unit*>(args.codes + id * args.code_stride);
  const Unit* scales = reinterpret_cast<const Unit*>(tail + id * tail_stride);
  Unit* out = reinterpret_cast<Unit*>(args.out) + pair * row_units;
  for (int i = lane; i < row_units; i += 32)
    out[i] = i < code_units ? __ldg(codes + i) : __ldg(scales + i - code_units);
}

template <class Format>
void launch_gather(const GatherArgs& args, cudaStream_t stream) {
  // Below some 4,096 pairs a row a warp fills the device better than fewer, longer warps.
  const bool is_small = args.num_pairs <= 4096;
  const int64_t pairs_a_block = kGatherWarps * (is_small ? 1 : 4);
  const unsigned blocks =
      static_cast<unsigned>((args.num_pairs + pairs_a_block - 1) / pairs_a_block);
  if (is_small)
    gather_kernel<Format, 1><<<blocks, kGatherThreads, 0, stream>>>(args);
  else
    gather_kernel<Format, 4><<<blocks, kGatherThreads, 0, stream>>>(args);
}

static void launch_gather_stored(const GatherArgs& args, const engram_table& table,
                                 cudaStream_t stream) {
  const int codes = static_cast<int>(code_bytes(table.format, table.head_dim));
  const int scales = static_cast<int>(scale_bytes(table.format, table.head_dim));
  const unsigned blocks = static_cast<unsigned>((args.num_pairs + kGatherWarps - 1) / kGatherWarps);
  const bool is_split = table.scales != nullptr;
  const int head = is_split ? codes : codes + scales, row = codes + scales;
  const uint8_t* tail = is_split ? table.scales : table.codes;
  if (head % 4 == 0 && row % 4 == 0 && (!is_split || scales % 4 == 0))
    gather_stored_kernel<uint32_t>
        <<<blocks, kGatherThreads, 0, stream>>>(args, head / 4, row / 4, tail, scales);
  else if (head % 2 == 0 && row % 2 == 0)
    gather_stored_kernel<uint16_t>
        <<<blocks, kGatherThreads, 0, stream>>>(args, head / 2, row / 2, tail, scales);
  else
    gather_stored_kernel<uint8_t>
        <<<blocks, kGatherThreads, 0, stream>>>(args, head, row, tail, scales);
}

static bool is_inline(const engram_gather_params& p) {
  return p.num_tokens <= ENGRAM_INLINE_TOKENS && p.hash->max_ngram_size <= 4;
}

static engram_status check_gather(const engram_gather_params& p) {
  ENGRAM_REQUIRE(p.table != nullptr, "gather: expected a table, got NULL");
  ENGRAM_REQUIRE(p.num_tokens >= 0, "gather: expected num_tokens >= 0, got %lld",
                 static_cast<long long>(p.num_tokens));
  ENGRAM_REQUIRE(row_bytes(p.table->format, p.table->head_dim) > 0,
                 "gather: expected a known row format and a head_dim of whole quant blocks, "
                 "got format %d, head_dim %d",
                 p.table->format, p.table->head_dim);
  ENGRAM_REQUIRE(p.table->scales == nullptr || scale_width(p.table->format) > 0,
                 "gather: expected scales apart from codes only for E4M3_E8M0_32 and E4M3_F32_32, "
                 "got format %d",
                 p.table->format);
  const bool is_hashed = p.windows != nullptr || p.descriptor != nullptr;
  ENGRAM_REQUIRE((p.windows != nullptr) + (p.hash_ids != nullptr) + (p.descriptor != nullptr) == 1,
                 "gather: expected exactly one of windows, hash_ids and a descriptor");
  ENGRAM_REQUIRE(!is_hashed || p.hash != nullptr,
                 "gather: expected hash constants with windows, got NULL");
  ENGRAM_REQUIRE(p.descriptor == nullptr || (is_inline(p) && p.output != ENGRAM_OUT_STORED),
                 "gather: a descriptor holds windows of at most 4 ids of at most %d tokens, whose "
                 "rows are dequantised",
                 ENGRAM_INLINE_TOKENS);
  ENGRAM_REQUIRE(p.num_cols > 0 &&
                     (!is_hashed || p.num_cols == (p.hash->max_ngram_size - 1) * p.hash->num_heads),
                 "gather: expected (N - 1) * num_heads hash columns, got %d", p.num_cols);
  ENGRAM_REQUIRE(p.output >= ENGRAM_OUT_BF16 && p.output <= ENGRAM_OUT_STORED,
                 "gather: expected output 0..2, got %d", p.output);
  ENGRAM_REQUIRE(p.output != ENGRAM_OUT_REQUANTIZED || p.table->head_dim % 32 == 0,
                 "gather: expected head_dim of whole groups of 32, got %d", p.table->head_dim);
  ENGRAM_REQUIRE(reinterpret_cast<uintptr_t>(p.out) % 16 == 0,
                 "gather: expected out at a multiple of 16 bytes, got %p", p.out);
  return ENGRAM_OK;
}

}  // namespace engram

engram_status engram_hash_prepare(engram_hash* hash, int64_t num_rows) {
  ENGRAM_REQUIRE(hash->max_ngram_size >= 2 && hash->max_ngram_size <= ENGRAM_MAX_NGRAM,
                 "hash: expected max_ngram_size 2..%d, got %d", ENGRAM_MAX_NGRAM,
                 hash->max_ngram_size);
  ENGRAM_REQUIRE(hash->num_heads >= 1 && hash->num_heads <= ENGRAM_MAX_HASH_COLS &&
                     (hash->max_ngram_size - 1) * hash->num_heads <= ENGRAM_MAX_HASH_COLS,
                 "hash: expected at most %d hash columns, got (%d - 1) * %d", ENGRAM_MAX_HASH_COLS,
                 hash->max_ngram_size, hash->num_heads);
  const int cols = (hash->max_ngram_size - 1) * hash->num_heads;
  for (int c = 0; c < cols; ++c) {
    const int64_t prime = hash->primes[c], offset = hash->offsets[c];
    ENGRAM_REQUIRE(prime > 0 && offset >= 0 && prime <= num_rows && offset <= num_rows - prime,
                   "hash: expected the bucket of column %d inside %lld rows, got [%lld, +%lld)", c,
                   static_cast<long long>(num_rows), static_cast<long long>(offset),
                   static_cast<long long>(prime));
    hash->reciprocals[c] = engram::reciprocal(prime);
  }
  return ENGRAM_OK;
}

engram_status engram_gather(const engram_gather_params* params) {
  using namespace engram;
  if (const engram_status status = check_gather(*params)) return status;
  if (params->num_tokens == 0) return ENGRAM_OK;
  const engram_table& table = *params->table;
  const bool is_split = table.scales != nullptr;
  const int64_t codes = code_bytes(table.format, table.head_dim);
  GatherArgs args{};
  args.codes = table.codes;
  args.code_stride = is_split ? codes : row_bytes(table.format, table.head_dim);
  args.scales = is_split ? table.scales : table.codes + codes;
  args.scale_stride = is_split ? scale_bytes(table.format, table.head_dim) : args.code_stride;
  args.is_inline = params->windows != nullptr && is_inline(*params);
  if (args.is_inline)
    memcpy(args.inline_windows, params->windows,
           static_cast<size_t>(params->num_tokens) * params->hash->max_ngram_size * 4);
  else
    args.windows = params->windows;
  if (params->descriptor != nullptr) {
    args.windows = params->descriptor->windows;
    args.slots = params->slots_out != nullptr ? params->descriptor->slots : nullptr;
    args.slots_out = params->slots_out;
    args.num_slots = static_cast<int32_t>(params->num_tokens);
  }
  args.is_released_early = params->is_released_early != 0;
  args.hash_ids = params->hash_ids;
  args.out = static_cast<uint8_t*>(params->out);
  args.num_pairs = params->num_tokens * params->num_cols;
  args.num_cols = params->num_cols;
  args.head_dim = table.head_dim;
  args.requantized = params->output == ENGRAM_OUT_REQUANTIZED;
  if (params->hash != nullptr) args.hash = *params->hash;
  const cudaStream_t stream = static_cast<cudaStream_t>(params->stream);
  if (params->output == ENGRAM_OUT_STORED)
    launch_gather_stored(args, table, stream);
  else
    visit_format(table.format,
                 [&](auto tag) { launch_gather<typename decltype(tag)::type>(args, stream); });
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

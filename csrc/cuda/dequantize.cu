// Stored weights -> bf16, once at load.   out[r, k] = bf16(dequantise(codes[r])[k])
// One thread a group of eight values.
#include <cuda_runtime.h>

#include "../formats/formats.h"
#include "../status.h"
#include "vector.cuh"

namespace engram {

constexpr int kDequantizeThreads = 256;

struct DequantizeArgs {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t code_stride, scale_stride, num_groups, groups_a_row;
  int32_t rows_per_scale;
  uint4* out;
};

template <class Format>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kDequantizeThreads + threadIdx.x;
  if (index >= args.num_groups) return;
  const int64_t row = index / args.groups_a_row;
  const int group = static_cast<int>(index - row * args.groups_a_row);
  const auto raw =
      load_row_group<Format>(args.codes + row * args.code_stride,
                             args.scales + row / args.rows_per_scale * args.scale_stride, group);
  float y[8];
  decode_row_group<Format>(raw, group, y);
  args.out[index] = pack_bf16(y);
}

}  // namespace engram

engram_status engram_dequantize(const engram_dequantize_params* params) {
  using namespace engram;
  const int64_t codes = code_bytes(params->format, params->row_values);
  ENGRAM_REQUIRE(codes > 0,
                 "dequantize: expected a known format and rows of whole quant blocks, got format "
                 "%d, %lld values",
                 params->format, static_cast<long long>(params->row_values));
  ENGRAM_REQUIRE(params->num_rows >= 0 && params->rows_per_scale >= 1,
                 "dequantize: expected num_rows >= 0 and rows_per_scale >= 1, got %lld and %d",
                 static_cast<long long>(params->num_rows), params->rows_per_scale);
  ENGRAM_REQUIRE(scale_width(params->format) > 0 || params->scales == nullptr,
                 "dequantize: expected scales only for E4M3_E8M0_32 and E4M3_F32_32, got format %d",
                 params->format);
  ENGRAM_REQUIRE(params->scales != nullptr || params->rows_per_scale == 1,
                 "dequantize: expected scales when rows share them, got NULL");
  if (params->num_rows == 0) return ENGRAM_OK;
  const bool is_split = params->scales != nullptr;
  const int64_t scales = scale_bytes(params->format, params->row_values);
  DequantizeArgs args{};
  args.codes = params->codes;
  args.code_stride = is_split ? codes : codes + scales;
  args.scales = is_split ? params->scales : params->codes + codes;
  args.scale_stride = is_split ? scales : args.code_stride;
  args.rows_per_scale = params->rows_per_scale;
  args.groups_a_row = params->row_values / 8;
  args.num_groups = params->num_rows * args.groups_a_row;
  args.out = static_cast<uint4*>(params->out);
  const int64_t blocks = (args.num_groups + kDequantizeThreads - 1) / kDequantizeThreads;
  ENGRAM_REQUIRE(blocks <= 0x7FFFFFFF, "dequantize: %lld values are too many for one launch",
                 static_cast<long long>(args.num_groups * 8));
  visit_format(params->format, [&](auto tag) {
    dequantize_kernel<typename decltype(tag)::type>
        <<<static_cast<unsigned>(blocks), kDequantizeThreads, 0,
           static_cast<cudaStream_t>(params->stream)>>>(args);
  });
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

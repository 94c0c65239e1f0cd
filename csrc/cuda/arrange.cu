// wkv as stored -> the same bytes in the order of the tensor cores, once at load. One warp a tile
// of 16 outputs and a stage of 256 k. See formats/arranged.h.
#include <cuda_runtime.h>

#include "../engram.h"
#include "../formats/arranged_blocks.h"
#include "../formats/formats.h"
#include "../status.h"

namespace engram {

constexpr int kArrangeWarps = 8;

struct ArrangeArgs {
  const uint8_t* codes;
  const uint8_t* scales;
  uint8_t* arranged;
  int32_t* is_exotic;
  int64_t num_tiles, num_stages, row_bytes, num_scales;
};

__global__ void __launch_bounds__(kArrangeWarps * 32)
    arrange_e4m3_kernel(const __grid_constant__ ArrangeArgs args) {
  bool is_exotic = false;
  uint8_t* scales = args.arranged + args.num_tiles * kTileOutputs * args.row_bytes;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.num_scales;
       i += num_threads) {
    scales[i] = args.scales[i];
    is_exotic |= !ArrangedE4M3::is_plain_scale(args.scales[i]);
  }
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kArrangeWarps + threadIdx.x / 32;
  const int64_t tile = warp / args.num_stages, stage = warp % args.num_stages;
  const int lane = threadIdx.x % 32;
  for (int unit = 0; unit < (tile < args.num_tiles ? kUnits : 0); ++unit) {
    const uint8_t* rows = args.codes + tile * kTileOutputs * args.row_bytes + stage * kStageValues +
                          unit * kUnitValues;
    const ArrangedE4M3::Unit made = ArrangedE4M3::arrange(rows, args.row_bytes, lane);
    is_exotic |= !made.is_plain;
    uint8_t* to = args.arranged +
                  stage_at<ArrangedE4M3>(tile, stage, args.num_tiles, args.num_stages) +
                  unit * ArrangedE4M3::kUnitBytes;
    *reinterpret_cast<uint4*>(to + lane * 16) = {made.word[0], made.word[1], made.word[2],
                                                 made.word[3]};
  }
  if (is_exotic) *args.is_exotic = 1;
}

template <class Arranged>
__global__ void __launch_bounds__(kArrangeWarps * 32)
    arrange_blocks_kernel(const __grid_constant__ ArrangeArgs args) {
  constexpr int kStored = Arranged::kStageBytes / kTileOutputs;  // an output's bytes of a stage
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kArrangeWarps + threadIdx.x / 32;
  const int64_t tile = warp / args.num_stages, stage = warp % args.num_stages;
  if (tile >= args.num_tiles) return;
  Arranged::arrange(
      args.codes + tile * kTileOutputs * args.row_bytes + stage * kStored, args.row_bytes,
      static_cast<int>(threadIdx.x % 32),
      args.arranged + stage_at<Arranged>(tile, stage, args.num_tiles, args.num_stages));
}

}  // namespace engram

int64_t engram_arranged_bytes(int32_t format, int64_t out_features, int64_t in_features) {
  return engram::arranged_bytes(format, out_features, in_features);
}

engram_status engram_arrange(const engram_arrange_params* params) {
  using namespace engram;
  const int64_t outputs = params->out_features, inputs = params->in_features;
  ENGRAM_REQUIRE(arranged_bytes(params->format, outputs, inputs) > 0,
                 "arrange: expected Q8_0, Q2_K, Q3_K, Q4_K or E4M3_E8M0_32, outputs in multiples "
                 "of 32 and inputs of 256, got format %d, %lld x %lld",
                 params->format, static_cast<long long>(outputs), static_cast<long long>(inputs));
  const bool is_fp8 = params->format == ENGRAM_E4M3_E8M0_32;
  ENGRAM_REQUIRE((params->scales != nullptr) == is_fp8,
                 "arrange: expected scales for E4M3_E8M0_32 and for nothing else");
  ArrangeArgs args{};
  args.codes = params->codes;
  args.scales = params->scales;
  args.arranged = static_cast<uint8_t*>(params->arranged);
  args.is_exotic = params->is_exotic;
  args.num_tiles = outputs / kTileOutputs;
  args.num_stages = inputs / kStageValues;
  args.row_bytes = is_fp8 ? inputs : row_bytes(params->format, inputs);
  args.num_scales = outputs / 32 * (inputs / 32);
  const int64_t blocks = (args.num_tiles * args.num_stages + kArrangeWarps - 1) / kArrangeWarps;
  ENGRAM_REQUIRE(blocks <= 0x7FFFFFFF, "arrange: %lld x %lld are too many values",
                 static_cast<long long>(outputs), static_cast<long long>(inputs));
  void (*kernel)(ArrangeArgs) = arrange_e4m3_kernel;
  visit_arranged_blocks(params->format,
                        [&](auto arranged) { kernel = arrange_blocks_kernel<decltype(arranged)>; });
  kernel<<<static_cast<unsigned>(blocks), kArrangeWarps * 32, 0,
           static_cast<cudaStream_t>(params->stream)>>>(args);
  ENGRAM_CUDA(cudaGetLastError());
  return ENGRAM_OK;
}

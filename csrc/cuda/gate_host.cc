// The gate between pinned host buffers: one launch in place for few tokens, else pieces that go up,
// through the gate and down on three streams, so that both directions of the link are busy.
#include <cuda_runtime.h>

#include <algorithm>

#include "../status.h"

namespace {

engram_gate_params piece_of(const engram_gate_host_params& p, int64_t first) {
  engram_gate_params piece = p.gate;
  const int64_t row_bytes =
      static_cast<int64_t>(p.gate.hc_mult) * p.gate.dim * (p.gate.is_f32 ? 4 : 2);
  piece.num_tokens = std::min(p.piece_tokens, p.gate.num_tokens - first);
  piece.slots = p.gate.slots + first;
  piece.is_dead = p.gate.is_dead == nullptr ? nullptr : p.gate.is_dead + first;
  piece.residual = static_cast<const char*>(p.gate.residual) + first * row_bytes;
  piece.out = static_cast<char*>(p.gate.out) + first * row_bytes;
  return piece;
}

engram_status gate_through_lane(const engram_gate_host_params& p, engram_gate_params piece,
                                int64_t turn) {
  const int64_t lane = turn % p.num_lanes;
  const cudaEvent_t arrived = static_cast<cudaEvent_t>(p.events[lane * 3]);
  const cudaEvent_t computed = static_cast<cudaEvent_t>(p.events[lane * 3 + 1]);
  const cudaEvent_t left = static_cast<cudaEvent_t>(p.events[lane * 3 + 2]);
  const cudaStream_t upload = static_cast<cudaStream_t>(p.upload);
  const cudaStream_t gate = static_cast<cudaStream_t>(p.gate.stream);
  const cudaStream_t download = static_cast<cudaStream_t>(p.download);
  const size_t num_bytes =
      static_cast<size_t>(piece.num_tokens) * piece.hc_mult * piece.dim * (piece.is_f32 ? 4 : 2);
  void* const buffer = p.lanes[lane];
  void* const out = piece.out;
  ENGRAM_CUDA(cudaStreamWaitEvent(upload, left, 0));  // never recorded: no wait
  ENGRAM_CUDA(cudaMemcpyAsync(buffer, piece.residual, num_bytes, cudaMemcpyHostToDevice, upload));
  ENGRAM_CUDA(cudaEventRecord(arrived, upload));
  ENGRAM_CUDA(cudaStreamWaitEvent(gate, arrived, 0));
  piece.residual = piece.out = buffer;
  if (const engram_status status = engram_gate(&piece)) return status;
  ENGRAM_CUDA(cudaEventRecord(computed, gate));
  ENGRAM_CUDA(cudaStreamWaitEvent(download, computed, 0));
  ENGRAM_CUDA(cudaMemcpyAsync(out, buffer, num_bytes, cudaMemcpyDeviceToHost, download));
  ENGRAM_CUDA(cudaEventRecord(left, download));
  return ENGRAM_OK;
}

}  // namespace

engram_status engram_gate_host(const engram_gate_host_params* params) {
  const engram_gate_host_params& p = *params;
  ENGRAM_REQUIRE(p.piece_tokens >= 1 && p.piece_tokens <= ENGRAM_INLINE_TOKENS,
                 "gate_host: expected piece_tokens 1..%d, got %lld", ENGRAM_INLINE_TOKENS,
                 static_cast<long long>(p.piece_tokens));
  ENGRAM_REQUIRE(p.is_mapped || p.num_lanes >= 1, "gate_host: expected lanes, got %d", p.num_lanes);
  ENGRAM_REQUIRE(p.gate.slots != nullptr, "gate_host: expected slots, got NULL");
  if (p.gate.num_tokens == 0) return ENGRAM_OK;
  if (p.after != nullptr)
    if (const engram_status status = engram_stream_wait(p.gate.stream, p.after)) return status;
  int64_t turn = 0;
  for (int64_t first = 0; first < p.gate.num_tokens; first += p.piece_tokens, ++turn) {
    const engram_gate_params piece = piece_of(p, first);
    if (const engram_status status =
            p.is_mapped ? engram_gate(&piece) : gate_through_lane(p, piece, turn))
      return status;
  }
  const engram_stream last = p.is_mapped ? p.gate.stream : p.download;
  if (const engram_status status = engram_event_record(p.done, last)) return status;
  return engram_event_wait(p.done, p.timeout_ms);
}

// Graphs: launches captured once, which read slots, windows, dead flags and pointers from a
// descriptor in pinned host memory when they run.
#include <cuda_runtime.h>
#include <string.h>

#include "../status.h"
#include "projections.h"

using engram::fail;

engram_status engram_capture_begin(engram_stream stream) {
  // Relaxed: what a library asks the driver for while it enqueues is its own business.
  ENGRAM_CUDA(
      cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeRelaxed));
  return ENGRAM_OK;
}

engram_status engram_capture_end(engram_stream stream, engram_graph* graph) {
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t made = nullptr;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  cudaError_t status = cudaStreamEndCapture(on, &captured);
  if (status == cudaSuccess) status = cudaGraphInstantiate(&made, captured, 0);
  if (captured != nullptr) cudaGraphDestroy(captured);
  // Uploaded now: the first launch then allocates nothing.
  if (status == cudaSuccess) status = cudaGraphUpload(made, on);
  if (status != cudaSuccess) {
    if (made != nullptr) cudaGraphExecDestroy(made);
    cudaGetLastError();  // a failed capture leaves the device as it was
    return fail(ENGRAM_UNSUPPORTED, "a graph could not be captured: %s",
                cudaGetErrorString(status));
  }
  *graph = made;
  return ENGRAM_OK;
}

engram_status engram_graph_launch(engram_graph graph, engram_stream stream) {
  ENGRAM_CUDA(
      cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream)));
  return ENGRAM_OK;
}

engram_status engram_graph_destroy(engram_graph graph) {
  ENGRAM_CUDA(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
  return ENGRAM_OK;
}

engram_status engram_replay(const engram_replay_params* params, const int64_t* slots,
                            const int32_t* windows, int64_t num_tokens, int64_t sequence) {
  const engram_replay_params& p = *params;
  const engram_projections& made = *p.projections;
  ENGRAM_REQUIRE(num_tokens >= 1 && num_tokens <= ENGRAM_INLINE_TOKENS,
                 "replay: expected 1..%d tokens, got %lld", ENGRAM_INLINE_TOKENS,
                 static_cast<long long>(num_tokens));
  ENGRAM_REQUIRE(p.max_ngram_size >= 2 && p.max_ngram_size <= 4,
                 "replay: expected max_ngram_size 2..4, got %d", p.max_ngram_size);
  if (const engram_status status = engram::check_slots(made, slots, nullptr, num_tokens))
    return status;
  memcpy(p.descriptor->slots, slots, static_cast<size_t>(num_tokens) * sizeof *slots);
  memcpy(p.descriptor->windows, windows,
         static_cast<size_t>(num_tokens * p.max_ngram_size) * sizeof *windows);
  if (const engram_status status = engram_graph_launch(p.graph, p.stream)) return status;
  if (const engram_status status =
          engram_event_record(made.ends[sequence % made.num_ends], p.stream))
    return status;
  for (int64_t t = 0; t < num_tokens; ++t)
    __atomic_store_n(made.made_by + slots[t], sequence, __ATOMIC_RELAXED);
  return ENGRAM_OK;
}

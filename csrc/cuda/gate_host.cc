// The gate between host buffers. Few tokens: one launch that reads and writes pinned memory in
// place. More: pieces, each up, through the gate and down on a lane's stream, so that several are
// under way and both directions of the link are busy. Pageable memory passes through the lanes'
// pinned stages; several threads copy, each with a lane of its own.
#include <cuda_runtime.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <atomic>

#include "../status.h"
#include "projections.h"
#include "workers.h"

using engram::fail;

namespace {

struct Call {
  const engram_gate_host_params& p;
  const int64_t* slots;
  const uint8_t* is_dead;
  const char* residual;
  char* out;
  int64_t num_tokens;
  engram_event after;  // what the gate waits for, or NULL
  int64_t token_bytes;
};

engram_gate_params piece_of(const Call& call, int64_t first) {
  engram_gate_params piece = call.p.gate;
  piece.num_tokens = std::min(call.p.piece_tokens, call.num_tokens - first);
  piece.slots = call.slots + first;
  piece.is_dead = call.is_dead + first;
  piece.residual = call.residual + first * call.token_bytes;
  piece.out = call.out + first * call.token_bytes;
  return piece;
}

engram_status wait_for(const Call& call, engram_stream stream) {
  return call.after == nullptr ? ENGRAM_OK : engram_stream_wait(stream, call.after);
}

// One launch a piece, in place in pinned memory.
engram_status gate_mapped(const Call& call, const engram_event done) {
  const engram_stream stream = call.p.gate.stream;
  if (const engram_status status = wait_for(call, stream)) return status;
  const engram_graph graph =
      call.p.graphs != nullptr && call.num_tokens <= ENGRAM_INLINE_TOKENS &&
              call.num_tokens <= call.p.piece_tokens
          ? call.p.graphs[call.num_tokens]
          : nullptr;
  if (graph != nullptr) {
    const size_t count = static_cast<size_t>(call.num_tokens);
    memcpy(call.p.descriptor->slots, call.slots, count * sizeof *call.slots);
    memcpy(call.p.descriptor->is_dead, call.is_dead, count);
    call.p.descriptor->residual = call.residual;
    call.p.descriptor->out = call.out;
    if (const engram_status status = engram_graph_launch(graph, stream)) return status;
  } else {
    for (int64_t first = 0; first < call.num_tokens; first += call.p.piece_tokens) {
      const engram_gate_params piece = piece_of(call, first);
      if (const engram_status status = engram_gate(&piece)) return status;
    }
  }
  if (const engram_status status = engram_event_record(done, stream)) return status;
  return engram_event_wait(done, call.p.timeout_ms);
}

// Enqueues one piece on a lane; its residual and out are pinned.
engram_status enqueue_piece(const Call& call, const engram_lane& lane, engram_gate_params piece,
                            bool is_first) {
  const cudaStream_t stream = static_cast<cudaStream_t>(lane.stream);
  const size_t num_bytes = static_cast<size_t>(piece.num_tokens * call.token_bytes);
  void* const out = piece.out;
  piece.stream = lane.stream;
  if (call.p.way == ENGRAM_WAY_MAPPED) return engram_gate(&piece);
  const engram_event* const marks = is_first ? call.p.marks : nullptr;
  const auto mark = [&](int i) {
    return marks == nullptr ? ENGRAM_OK : engram_event_record(marks[i], lane.stream);
  };
  if (const engram_status status = mark(0)) return status;
  ENGRAM_CUDA(
      cudaMemcpyAsync(lane.device, piece.residual, num_bytes, cudaMemcpyHostToDevice, stream));
  if (const engram_status status = mark(1)) return status;
  piece.residual = lane.device;
  if (call.p.way == ENGRAM_WAY_COPIED) piece.out = lane.device;
  if (const engram_status status = engram_gate(&piece)) return status;
  if (const engram_status status = mark(2)) return status;
  if (call.p.way == ENGRAM_WAY_COPIED)
    ENGRAM_CUDA(cudaMemcpyAsync(out, lane.device, num_bytes, cudaMemcpyDeviceToHost, stream));
  return mark(3);
}

engram_status gate_through_lanes(const Call& call) {
  const int64_t num_pieces =
      (call.num_tokens + call.p.piece_tokens - 1) / call.p.piece_tokens;
  const int num_lanes = static_cast<int>(std::min<int64_t>(call.p.num_lanes, num_pieces));
  for (int i = 0; i < num_lanes; ++i)
    if (const engram_status status = wait_for(call, call.p.lanes[i].stream)) return status;
  for (int64_t i = 0; i < num_pieces; ++i) {
    const engram_lane& lane = call.p.lanes[i % num_lanes];
    const engram_gate_params piece = piece_of(call, i * call.p.piece_tokens);
    if (const engram_status status = enqueue_piece(call, lane, piece, i == 0)) return status;
    if (i < num_pieces - num_lanes) continue;
    if (const engram_status status = engram_event_record(lane.done, lane.stream)) return status;
  }
  for (int i = 0; i < num_lanes; ++i)
    if (const engram_status status = engram_event_wait(call.p.lanes[i].done, call.p.timeout_ms))
      return status;
  return ENGRAM_OK;
}

// A worker takes pieces until there are none: into its stage, through its lane, out of its stage.
struct PageableJob {
  const Call& call;
  std::atomic<int64_t> next{0};
  std::atomic<int> status{ENGRAM_OK};
  char text[1024] = "";

  engram_status carry(const engram_lane& lane, int64_t first) {
    engram_gate_params piece = piece_of(call, first);
    const size_t num_bytes = static_cast<size_t>(piece.num_tokens * call.token_bytes);
    void* const out = piece.out;
    memcpy(lane.stage, piece.residual, num_bytes);
    piece.residual = piece.out = lane.stage;
    if (const engram_status failed = enqueue_piece(call, lane, piece, first == 0))
      return failed;
    if (const engram_status failed = engram_event_record(lane.done, lane.stream)) return failed;
    if (const engram_status failed = engram_event_wait(lane.done, call.p.timeout_ms))
      return failed;
    memcpy(out, lane.stage, num_bytes);
    return ENGRAM_OK;
  }

  void work(int worker) {
    const engram_lane& lane = call.p.lanes[worker];
    engram_status mine = wait_for(call, lane.stream);
    while (mine == ENGRAM_OK && status.load(std::memory_order_relaxed) == ENGRAM_OK) {
      const int64_t first =
          next.fetch_add(1, std::memory_order_relaxed) * call.p.piece_tokens;
      if (first >= call.num_tokens) return;
      mine = carry(lane, first);
    }
    int none = ENGRAM_OK;
    // The text is this thread's: the first failure hands it to the caller's.
    if (mine != ENGRAM_OK && status.compare_exchange_strong(none, mine))
      strncpy(text, engram_last_error(), sizeof text - 1);
  }
};

engram_status gate_pageable(const Call& call) {
  if (call.num_tokens <= call.p.piece_tokens) {
    const engram_lane& lane = call.p.lanes[0];
    const size_t num_bytes = static_cast<size_t>(call.num_tokens * call.token_bytes);
    memcpy(lane.stage, call.residual, num_bytes);
    Call staged = call;
    staged.residual = staged.out = static_cast<char*>(lane.stage);
    if (const engram_status status = gate_mapped(staged, lane.done)) return status;
    memcpy(call.out, lane.stage, num_bytes);
    return ENGRAM_OK;
  }
  const int64_t num_pieces =
      (call.num_tokens + call.p.piece_tokens - 1) / call.p.piece_tokens;
  const int64_t able = std::min(call.p.num_lanes, call.p.workers->num_threads() + 1);
  PageableJob job{call};
  call.p.workers->run(
      [](void* context, int worker) { static_cast<PageableJob*>(context)->work(worker); }, &job,
      static_cast<int>(std::min(able, num_pieces)));
  const int status = job.status.load();
  if (status == ENGRAM_OK) return ENGRAM_OK;
  return fail(static_cast<engram_status>(status), "%s", job.text);
}

engram_status check(const engram_gate_host_params& p) {
  ENGRAM_REQUIRE(p.piece_tokens >= 1 && p.piece_tokens <= ENGRAM_INLINE_TOKENS,
                 "gate_host: expected piece_tokens 1..%d, got %lld", ENGRAM_INLINE_TOKENS,
                 static_cast<long long>(p.piece_tokens));
  ENGRAM_REQUIRE(p.way >= ENGRAM_WAY_MAPPED && p.way <= ENGRAM_WAY_WRITTEN,
                 "gate_host: expected way 0..2, got %d", p.way);
  ENGRAM_REQUIRE(p.num_lanes >= 1 && p.lanes != nullptr, "gate_host: expected lanes, got %d",
                 p.num_lanes);
  ENGRAM_REQUIRE(!p.is_pageable || p.workers != nullptr,
                 "gate_host: expected workers for pageable memory, got NULL");
  return ENGRAM_OK;
}

}  // namespace

engram_status engram_gate_host(const engram_gate_host_params* params, const int64_t* slots,
                               const uint8_t* is_dead, const void* residual, void* out,
                               int64_t num_tokens) {
  const engram_gate_host_params& p = *params;
  if (const engram_status status = check(p)) return status;
  if (num_tokens == 0) return ENGRAM_OK;
  ENGRAM_REQUIRE(slots != nullptr && is_dead != nullptr && num_tokens > 0,
                 "gate_host: expected slots, dead flags and num_tokens >= 0, got %lld",
                 static_cast<long long>(num_tokens));
  if (const engram_status status = engram::check_slots(*p.projections, slots, is_dead, num_tokens))
    return status;
  Call call{p,
            slots,
            is_dead,
            static_cast<const char*>(residual),
            static_cast<char*>(out),
            num_tokens,
            nullptr,
            static_cast<int64_t>(p.gate.hc_mult) * p.gate.dim * (p.gate.is_f32 ? 4 : 2)};
  if (const engram_status status =
          engram::projection_of(*p.projections, slots, is_dead, num_tokens, call.after))
    return status;
  if (p.is_pageable) return gate_pageable(call);
  return p.way == ENGRAM_WAY_MAPPED ? gate_mapped(call, p.lanes[0].done) : gate_through_lanes(call);
}

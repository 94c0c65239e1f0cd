// The gate between host buffers. Few tokens: one launch that reads and writes pinned memory in
// place; while their projection still runs, the residual goes up ahead of it. More: pieces that go
// up, through the gate and down on three streams, so that both directions of the link are busy.
// Pageable memory passes through the lanes' pinned stages; several threads copy, each with a lane
// and a stream of its own.
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

engram_gate_params piece_of(const Call& call, int64_t first, int64_t num_tokens) {
  engram_gate_params piece = call.p.gate;
  piece.num_tokens = std::min(num_tokens, call.num_tokens - first);
  piece.slots = call.slots + first;
  piece.is_dead = call.is_dead + first;
  piece.residual = call.residual + first * call.token_bytes;
  piece.out = call.out + first * call.token_bytes;
  return piece;
}

engram_status wait_for(const Call& call, engram_stream stream) {
  return call.after == nullptr ? ENGRAM_OK : engram_stream_wait(stream, call.after);
}

// Bytes that are on the device before a projection of stored weights ends (some 50 us).
constexpr int64_t kAheadBytes = 64 * 4 * 5120 * 2;

// The residual to the first lane, beside the projection that the gate waits for anyway.
engram_status send_ahead(const Call& call, engram_stream stream, const void*& residual) {
  const engram_lane& lane = call.p.lanes[0];
  const cudaStream_t upload = static_cast<cudaStream_t>(call.p.upload);
  const cudaEvent_t arrived = static_cast<cudaEvent_t>(lane.arrived);
  ENGRAM_CUDA(cudaMemcpyAsync(lane.device, residual,
                              static_cast<size_t>(call.num_tokens * call.token_bytes),
                              cudaMemcpyHostToDevice, upload));
  ENGRAM_CUDA(cudaEventRecord(arrived, upload));
  ENGRAM_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), arrived, 0));
  residual = lane.device;
  return ENGRAM_OK;
}

// One launch a piece, in place in pinned memory.
engram_status gate_mapped(const Call& call, const engram_event done) {
  const engram_stream stream = call.p.gate.stream;
  const engram_graph graph = call.p.graphs != nullptr && call.num_tokens <= ENGRAM_INLINE_TOKENS &&
                                     call.num_tokens <= call.p.piece_tokens
                                 ? call.p.graphs[call.num_tokens]
                                 : nullptr;
  const void* residual = call.residual;
  if (graph != nullptr && call.after != nullptr &&
      call.num_tokens * call.token_bytes <= kAheadBytes)
    if (const engram_status status = send_ahead(call, stream, residual)) return status;
  if (const engram_status status = wait_for(call, stream)) return status;
  if (graph != nullptr) {
    const size_t count = static_cast<size_t>(call.num_tokens);
    memcpy(call.p.descriptor->slots, call.slots, count * sizeof *call.slots);
    memcpy(call.p.descriptor->is_dead, call.is_dead, count);
    call.p.descriptor->residual = residual;
    call.p.descriptor->out = call.out;
    if (const engram_status status = engram_graph_launch(graph, stream)) return status;
  } else {
    for (int64_t first = 0; first < call.num_tokens; first += call.p.piece_tokens) {
      const engram_gate_params piece = piece_of(call, first, call.p.piece_tokens);
      if (const engram_status status = engram_gate(&piece)) return status;
    }
  }
  if (const engram_status status = engram_event_record(done, stream)) return status;
  return engram_event_wait(done, call.p.timeout_ms);
}

// Small pieces first and last: the link stands idle one way while the first goes up and the last
// comes down. Between them large ones, which outlast their launches.
int64_t ramped(const Call& call, int64_t first) {
  constexpr int64_t kSmallest = 16;
  const int64_t rest = call.num_tokens - first;
  const int64_t begun = first < kSmallest ? kSmallest : first;  // 16, 16, 32, 64, 64, ...
  return std::min({call.p.piece_tokens, begun, std::max(kSmallest, (rest + 1) / 2)});
}

// One piece on three streams. marks: as in the parameters, or NULL
engram_status send_piece(const Call& call, const engram_lane& lane, engram_gate_params piece,
                         bool is_first_use, const engram_event* marks) {
  const engram_stream streams[] = {call.p.upload, call.p.gate.stream, call.p.download};
  const cudaStream_t upload = static_cast<cudaStream_t>(streams[0]);
  const cudaStream_t gate = static_cast<cudaStream_t>(streams[1]);
  const cudaStream_t download = static_cast<cudaStream_t>(streams[2]);
  const cudaEvent_t arrived = static_cast<cudaEvent_t>(lane.arrived);
  const cudaEvent_t computed = static_cast<cudaEvent_t>(lane.computed);
  const cudaEvent_t left = static_cast<cudaEvent_t>(lane.done[0]);
  const size_t num_bytes = static_cast<size_t>(piece.num_tokens * call.token_bytes);
  const void* const from = piece.residual;
  void* const out = piece.out;
  const auto mark = [&](int i, engram_stream stream) {
    return marks == nullptr ? ENGRAM_OK : engram_event_record(marks[i], stream);
  };
  if (!is_first_use) ENGRAM_CUDA(cudaStreamWaitEvent(upload, left, 0));
  if (const engram_status status = mark(0, upload)) return status;
  ENGRAM_CUDA(cudaMemcpyAsync(lane.device, from, num_bytes, cudaMemcpyHostToDevice, upload));
  if (const engram_status status = mark(1, upload)) return status;
  ENGRAM_CUDA(cudaEventRecord(arrived, upload));
  ENGRAM_CUDA(cudaStreamWaitEvent(gate, arrived, 0));
  piece.residual = piece.out = lane.device;
  if (const engram_status status = engram_gate(&piece)) return status;
  if (const engram_status status = mark(2, gate)) return status;
  ENGRAM_CUDA(cudaEventRecord(computed, gate));
  ENGRAM_CUDA(cudaStreamWaitEvent(download, computed, 0));
  ENGRAM_CUDA(cudaMemcpyAsync(out, lane.device, num_bytes, cudaMemcpyDeviceToHost, download));
  if (const engram_status status = mark(3, download)) return status;
  ENGRAM_CUDA(cudaEventRecord(left, download));
  return ENGRAM_OK;
}

engram_status gate_copied(const Call& call) {
  if (const engram_status status = wait_for(call, call.p.gate.stream)) return status;
  const engram_lane* lane = nullptr;
  int64_t turn = 0;
  for (int64_t first = 0; first < call.num_tokens; ++turn) {
    lane = call.p.lanes + turn % call.p.num_lanes;
    const engram_gate_params piece = piece_of(call, first, ramped(call, first));
    if (const engram_status status = send_piece(call, *lane, piece, turn < call.p.num_lanes,
                                                turn == 0 ? call.p.marks : nullptr))
      return status;
    first += piece.num_tokens;
  }
  return engram_event_wait(lane->done[0], call.p.timeout_ms);
}

// One piece of a worker on its lane's stream; its residual and out are pinned.
engram_status carry_piece(const Call& call, const engram_lane& lane, void* buffer,
                          engram_gate_params piece, const engram_event* marks) {
  const cudaStream_t stream = static_cast<cudaStream_t>(lane.stream);
  const size_t num_bytes = static_cast<size_t>(piece.num_tokens * call.token_bytes);
  void* const out = piece.out;
  piece.stream = lane.stream;
  if (call.p.way == ENGRAM_WAY_MAPPED) return engram_gate(&piece);
  const auto mark = [&](int i) {
    return marks == nullptr ? ENGRAM_OK : engram_event_record(marks[i], lane.stream);
  };
  if (const engram_status status = mark(0)) return status;
  ENGRAM_CUDA(cudaMemcpyAsync(buffer, piece.residual, num_bytes, cudaMemcpyHostToDevice, stream));
  if (const engram_status status = mark(1)) return status;
  piece.residual = piece.out = buffer;
  if (const engram_status status = engram_gate(&piece)) return status;
  if (const engram_status status = mark(2)) return status;
  ENGRAM_CUDA(cudaMemcpyAsync(out, buffer, num_bytes, cudaMemcpyDeviceToHost, stream));
  return mark(3);
}

// A worker takes pieces until there are none: into its stage, through its lane, out of its stage.
// A piece is half a lane: while one is under way the worker copies the other.
struct PageableJob {
  const Call& call;
  std::atomic<int64_t> next{0};
  std::atomic<int> status{ENGRAM_OK};
  char text[1024] = "";

  struct Half {
    void* out = nullptr;  // where its result belongs, NULL: nothing under way
    size_t num_bytes = 0;
  };

  engram_status send(const engram_lane& lane, int half, Half& mine, int64_t first) {
    engram_gate_params piece = piece_of(call, first, call.p.piece_tokens);
    const int64_t offset = half * (ENGRAM_INLINE_TOKENS / 2) * call.token_bytes;
    void* const stage = static_cast<char*>(lane.stage) + offset;
    mine = {piece.out, static_cast<size_t>(piece.num_tokens * call.token_bytes)};
    memcpy(stage, piece.residual, mine.num_bytes);
    piece.residual = piece.out = stage;
    void* const buffer = static_cast<char*>(lane.device) + offset;
    const engram_event* const marks = first == 0 ? call.p.marks : nullptr;
    if (const engram_status failed = carry_piece(call, lane, buffer, piece, marks)) return failed;
    return engram_event_record(lane.done[half], lane.stream);
  }

  engram_status receive(const engram_lane& lane, int half, Half& mine) {
    if (mine.out == nullptr) return ENGRAM_OK;
    if (const engram_status failed = engram_event_wait(lane.done[half], call.p.timeout_ms))
      return failed;
    const int64_t offset = half * (ENGRAM_INLINE_TOKENS / 2) * call.token_bytes;
    memcpy(mine.out, static_cast<char*>(lane.stage) + offset, mine.num_bytes);
    mine.out = nullptr;
    return ENGRAM_OK;
  }

  engram_status carry_all(const engram_lane& lane) {
    Half halves[2];
    if (const engram_status failed = wait_for(call, lane.stream)) return failed;
    int half = 0;
    for (; status.load(std::memory_order_relaxed) == ENGRAM_OK; half ^= 1) {
      if (const engram_status failed = receive(lane, half, halves[half])) return failed;
      const int64_t first = next.fetch_add(1, std::memory_order_relaxed) * call.p.piece_tokens;
      if (first >= call.num_tokens) break;
      if (const engram_status failed = send(lane, half, halves[half], first)) return failed;
    }
    return receive(lane, half ^ 1, halves[half ^ 1]);
  }

  void work(int worker) {
    const engram_status mine = carry_all(call.p.lanes[worker]);
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
    if (const engram_status status = gate_mapped(staged, lane.done[0])) return status;
    memcpy(call.out, lane.stage, num_bytes);
    return ENGRAM_OK;
  }
  ENGRAM_REQUIRE(call.p.piece_tokens <= ENGRAM_INLINE_TOKENS / 2,
                 "gate_host: expected pieces of at most half a lane, got %lld",
                 static_cast<long long>(call.p.piece_tokens));
  const int64_t num_pieces = (call.num_tokens + call.p.piece_tokens - 1) / call.p.piece_tokens;
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
  ENGRAM_REQUIRE(p.way >= ENGRAM_WAY_MAPPED && p.way <= ENGRAM_WAY_COPIED,
                 "gate_host: expected way 0..1, got %d", p.way);
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
  return p.way == ENGRAM_WAY_MAPPED ? gate_mapped(call, p.lanes[0].done[0]) : gate_copied(call);
}

// libengram_cpu: what the service computes on a CPU itself. Plain C, no dependencies.
//
// Addresses are the caller's; nothing is kept and nothing is allocated but threads. Bits depend on
// no compiler, instruction set, number of threads or batch: sums have 32 lanes and a fixed tree,
// nothing is contracted to a fused multiply-add, and the exponential is our own.
#pragma once
#include <stdint.h>

#define ENGRAM_CPU_ABI_VERSION 3
#define ENGRAM_CPU_PAGE 256

#ifdef __cplusplus
extern "C" {
#endif

// A status of 0 is success; 1: a slot, position or size is out of range, and nothing was written.

int32_t engram_cpu_abi_version(void);

// What runs here: "avx512", "avx2" or "baseline".
const char* engram_cpu_target(void);

// out = h + sigmoid(signed sqrt of the normalised dot of h and key) * value, per stream.
typedef struct {
  const void* kv;          // bf16 [num_slots, (hc_mult + 1) * dim]
  const int64_t* slots;    // [num_tokens]; NULL: token t has slot t
  const uint8_t* is_dead;  // [num_tokens]; NULL: none is. A dead token keeps its bits
  const float* qk;         // [hc_mult, dim]
  const void* residual;    // bf16 or f32 [num_tokens, hc_mult, dim]
  void* out;               // as residual, and may be residual
  int64_t num_slots;
  int64_t num_tokens;
  int64_t dim;
  int32_t hc_mult;
  int32_t is_f32;
  int32_t num_threads;
  float eps;
} engram_cpu_gate_params;

int32_t engram_cpu_gate(const engram_cpu_gate_params* params);

// The sessions of an engine, by row: `engram_core/sessions.py` and `pages.py` own them.
typedef struct {
  int64_t* fence;         // [4, num_rows]: length, base, epoch, epoch at the opening
  double* last_used_s;    // [num_rows]
  int32_t* ids;           // all pages
  const int64_t* starts;  // [num_rows, pages_per_row]: first id of each page
  int64_t num_rows;
  int64_t pages_per_row;
  int64_t held_tokens;  // of all sessions, and how many may be
  int64_t max_held_tokens;
} engram_cpu_sessions;

// A session as a segment leaves it.
typedef struct {
  int64_t row, length, base, epoch;
} engram_cpu_spot;

// A batch of one layer: what its asks find, one behind the other.
typedef struct {
  int32_t* keys;             // out [max_tokens, 2 + max_ngram_size]: tenant, layer, window
  uint8_t* is_dead;          // out [max_tokens]
  engram_cpu_spot* spots;    // out [max_tokens]: of each segment
  const int32_t* token_map;  // [vocab_size]
  int64_t vocab_size;
  int64_t max_tokens;
  int64_t num_tokens;  // out, as the next two: that the batch has
  int64_t num_spots;
  int64_t num_ids;  // of its tokens, that are appended
  int32_t max_ngram_size;
  int32_t pad_id;
  int32_t layer;
} engram_cpu_batch;

// Segments that are judged together, all or none. Behind this lie, int64 each: row (-1 = not open),
// position, count and epoch of each; the token ids.
typedef struct {
  int64_t begins;        // whether the batch has nothing yet
  int64_t num_segments;  // of what lies behind
  int64_t num_ids;       // to be appended first, one for each position; -1: it is a read
  int64_t tenant;        // of the keys
} engram_cpu_ask;

#define ENGRAM_CPU_EPOCH_OPENED (-1)

// Takes an ask into a batch if all its segments are plain, as `fence.py` has it: open, of that
// epoch, and held; or, to be appended, right at the end, all in the page that the session ends in,
// of no session twice, and with room for the ids. Ids lie behind the end then, where nobody reads
// them before `engram_cpu_settle`. Returns its tokens, 0: it is not plain, and nothing was done.
int64_t engram_cpu_judge(const engram_cpu_sessions* sessions, engram_cpu_batch* batch,
                         const engram_cpu_ask* ask);

// Ends sessions where a batch says, and renews them. now_s: of their clock
void engram_cpu_settle(engram_cpu_sessions* sessions, const engram_cpu_batch* batch, double now_s);

#ifdef __cplusplus
}
#endif

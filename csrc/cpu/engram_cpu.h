// libengram_cpu: what the service computes on a CPU itself. Plain C, no dependencies.
//
// Addresses are the caller's; nothing is kept and nothing is allocated but threads. Bits depend on
// no compiler, instruction set, number of threads or batch: sums have 32 lanes and a fixed tree,
// nothing is contracted to a fused multiply-add, and the exponential is our own.
#pragma once
#include <stdint.h>

#define ENGRAM_CPU_ABI_VERSION 1
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

// The store's keys of consecutive positions of one session: tenant, layer, window (newest first,
// after blocking). `engram_core/pages.py` owns ids and starts.
typedef struct {
  const int32_t* ids;     // all pages
  const int64_t* starts;  // first id of each page of the session: [pages]
  int64_t num_pages;      // entries of starts
  int64_t position;       // first position, and count of them: each is held
  int64_t count;
  int32_t max_ngram_size;
  int32_t pad_id;
  int32_t tenant;
  int32_t layer;
  int32_t* keys;     // out [count, 2 + max_ngram_size]
  uint8_t* is_dead;  // out [count]
} engram_cpu_keys_params;

int32_t engram_cpu_keys(const engram_cpu_keys_params* params);

#ifdef __cplusplus
}
#endif

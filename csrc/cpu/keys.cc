// The store's keys of a few positions of one session, and what the library is.

#include "clones.h"
#include "engram_cpu.h"

namespace {
constexpr int32_t DEAD = -1;
}

extern "C" int32_t engram_cpu_abi_version(void) { return ENGRAM_CPU_ABI_VERSION; }

extern "C" const char* engram_cpu_target(void) {
#if ENGRAM_HAS_CLONES
  __builtin_cpu_init();
  if (ENGRAM_HAS_V4) return "avx512";
  return __builtin_cpu_supports("avx2") ? "avx2" : "baseline";
#else
  return "baseline";
#endif
}

extern "C" int32_t engram_cpu_keys(const engram_cpu_keys_params* params) {
  const engram_cpu_keys_params& p = *params;
  const int64_t end = p.position + p.count;
  if (p.position < 0 || p.count < 0 || end > p.num_pages * ENGRAM_CPU_PAGE) return 1;
  int32_t* key = p.keys;
  for (int64_t t = 0; t < p.count; ++t) {
    key[0] = p.tenant;
    key[1] = p.layer;
    bool is_blocked = false;
    for (int32_t n = 0; n < p.max_ngram_size; ++n) {
      const int64_t at = p.position + t - n;
      // From the first dead position, or the start, on everything older is padding.
      const int32_t id = is_blocked || at < 0
                             ? DEAD
                             : p.ids[p.starts[at / ENGRAM_CPU_PAGE] + at % ENGRAM_CPU_PAGE];
      is_blocked = id == DEAD;
      key[2 + n] = is_blocked ? p.pad_id : id;
      if (n == 0) p.is_dead[t] = is_blocked;
    }
    key += 2 + p.max_ngram_size;
  }
  return 0;
}

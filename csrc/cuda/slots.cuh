// Slots and dead flags of a launch: inside its parameters for small batches (no copy, no wait),
// in memory for larger ones.
#pragma once

#include <stdint.h>
#include <string.h>

#include "../engram.h"

namespace engram {

struct SlotList {
  const int64_t* slots;
  const uint8_t* is_dead;
  bool is_inline;
  int64_t inline_slots[ENGRAM_INLINE_TOKENS];
  uint8_t inline_dead[ENGRAM_INLINE_TOKENS];

  __device__ __forceinline__ int64_t slot(int64_t token) const {
    if (is_inline) return inline_slots[token];
    return slots != nullptr ? slots[token] : token;
  }

  __device__ __forceinline__ bool dead(int64_t token) const {
    if (is_inline) return inline_dead[token] != 0;
    return is_dead != nullptr && is_dead[token] != 0;
  }
};

inline void fill_slot_list(SlotList& list, const int64_t* slots, const uint8_t* is_dead,
                           int64_t num_tokens, bool on_device = false) {
  list.slots = slots;
  list.is_dead = is_dead;
  list.is_inline = num_tokens <= ENGRAM_INLINE_TOKENS && !on_device;
  if (!list.is_inline) return;
  for (int64_t t = 0; t < num_tokens; ++t) {
    list.inline_slots[t] = slots != nullptr ? slots[t] : t;
    list.inline_dead[t] = is_dead != nullptr ? is_dead[t] : 0;
  }
}

}  // namespace engram

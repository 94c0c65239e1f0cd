#include "projections.h"

#include <algorithm>

#include "../status.h"

namespace engram {

engram_status check_slots(const engram_projections& projections, const int64_t* slots,
                          const uint8_t* is_dead, int64_t num_tokens) {
  int64_t lowest = INT64_MAX, highest = -1;
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (is_dead != nullptr && is_dead[t]) continue;
    lowest = std::min(lowest, slots[t]);
    highest = std::max(highest, slots[t]);
  }
  ENGRAM_REQUIRE(lowest >= 0 && highest < projections.num_slots,
                 "slots: expected 0..%lld, got [%lld, %lld]",
                 static_cast<long long>(projections.num_slots - 1), static_cast<long long>(lowest),
                 static_cast<long long>(highest));
  return ENGRAM_OK;
}

engram_status projection_of(const engram_projections& projections, const int64_t* slots,
                            const uint8_t* is_dead, int64_t num_tokens, engram_event& after) {
  // Another thread may be projecting into other slots.
  int64_t last = 0;
  for (int64_t t = 0; t < num_tokens; ++t)
    if (is_dead == nullptr || !is_dead[t])
      last = std::max(last, __atomic_load_n(projections.made_by + slots[t], __ATOMIC_RELAXED));
  after = nullptr;
  if (last <= __atomic_load_n(projections.finished, __ATOMIC_RELAXED)) return ENGRAM_OK;
  const engram_event end = projections.ends[last % projections.num_ends];
  int32_t is_done = 0;
  if (const engram_status status = engram_event_is_done(end, &is_done)) return status;
  if (!is_done) {
    after = end;
    return ENGRAM_OK;
  }
  if (last > __atomic_load_n(projections.finished, __ATOMIC_RELAXED))
    __atomic_store_n(projections.finished, last, __ATOMIC_RELAXED);
  return ENGRAM_OK;
}

}  // namespace engram

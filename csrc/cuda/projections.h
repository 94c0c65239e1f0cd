// Which projections the slots of a read wait for.
#pragma once

#include "../engram.h"

namespace engram {

// Refuses slots outside the store; those of dead tokens are not looked at.
engram_status check_slots(const engram_projections& projections, const int64_t* slots,
                          const uint8_t* is_dead, int64_t num_tokens);

// The end of the last projection that any of the slots waits for, NULL if all have ended.
engram_status projection_of(const engram_projections& projections, const int64_t* slots,
                            const uint8_t* is_dead, int64_t num_tokens, engram_event& after);

}  // namespace engram

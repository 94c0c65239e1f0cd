// Q6_K: 256 values in 210 bytes: low[128] of 4 bits, high[64] of 2 bits, scales int8[16], d f16.
// y = (d * scale) * (code - 32).
#pragma once

#include "scalar.h"

namespace engram {

struct Q6K {
  static constexpr int kBlockValues = 256, kBlockBytes = 210;
  struct Group {
    Bytes8 low, high;
    uint32_t scale, d;
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int group) {
    const int half = group >> 4, quarter = (group >> 2) & 3, part = group & 3;
    return {load_bytes8(block + half * 64 + (quarter & 1) * 32 + part * 8),
            load_bytes8(block + 128 + half * 32 + part * 8),
            load<uint8_t>(block + 192 + (group >> 1)), load<uint16_t>(block + 208)};
  }

  ENGRAM_HD static void decode(const Group& raw, int group, float (&y)[8]) {
    const int quarter = (group >> 2) & 3;
    const float scale = mul(half_to_float(static_cast<uint16_t>(raw.d)),
                            static_cast<float>(static_cast<int8_t>(raw.scale)));
    for (int i = 0; i < 8; ++i) {
      const uint32_t low = (raw.low.byte(i) >> (4 * (quarter >> 1))) & 15u;
      const uint32_t high = (raw.high.byte(i) >> (2 * quarter)) & 3u;
      y[i] = mul(scale, static_cast<float>(static_cast<int>(low | (high << 4)) - 32));
    }
  }
};

}  // namespace engram

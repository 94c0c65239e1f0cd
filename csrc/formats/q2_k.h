// Q2_K: 256 values in 84 bytes: scales[16] (low nibble scale, high nibble min), codes[64] of 2
// bits, d f16, dmin f16. y = (d * scale) * code - dmin * min.
// Value e: half = e / 128, shift = 2 * (e % 128 / 32), byte half * 32 + e % 32.
#pragma once

#include "scalar.h"

namespace engram {

struct Q2K {
  static constexpr int kBlockValues = 256, kBlockBytes = 84;
  struct Group {
    Bytes8 codes;
    uint32_t d_dmin, scale;
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int group) {
    const int half = group >> 4, quarter = (group >> 2) & 3, part = group & 3;
    return {load_bytes8_aligned(block + 16 + half * 32 + part * 8), load<uint32_t>(block + 80),
            load<uint8_t>(block + half * 8 + quarter * 2 + (part >> 1))};
  }

  ENGRAM_HD static void decode(const Group& raw, int group, float (&y)[8]) {
    const int shift = 2 * ((group >> 2) & 3);
    const float scale =
        mul(half_to_float(static_cast<uint16_t>(raw.d_dmin)), static_cast<float>(raw.scale & 15u));
    const float min = mul(half_to_float(static_cast<uint16_t>(raw.d_dmin >> 16)),
                          static_cast<float>(raw.scale >> 4));
    for (int i = 0; i < 8; ++i)
      y[i] = sub(mul(scale, static_cast<float>((raw.codes.byte(i) >> shift) & 3u)), min);
  }
};

}  // namespace engram

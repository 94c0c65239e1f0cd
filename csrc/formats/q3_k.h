// Q3_K: 256 values in 110 bytes: hmask[32] (third bit), codes[64] of 2 bits, scales[12] (16 of 6
// bits, biased by 32), d f16. y = (d * (scale - 32)) * (code - (bit ? 0 : 4)).
#pragma once

#include "scalar.h"

namespace engram {

struct Q3K {
  static constexpr int kBlockValues = 256, kBlockBytes = 110;
  struct Group {
    Bytes8 codes, high_bits;
    uint32_t scale_low, scale_high, d;
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int group) {
    const int half = group >> 4, part = group & 3;
    const int scale = group >> 1;  // 16 values share one
    return {load_bytes8(block + 32 + half * 32 + part * 8), load_bytes8(block + part * 8),
            load<uint8_t>(block + 96 + (scale & 7)), load<uint8_t>(block + 104 + (scale & 3)),
            load<uint16_t>(block + 108)};
  }

  ENGRAM_HD static void decode(const Group& raw, int group, float (&y)[8]) {
    const int scale_index = group >> 1, plane = group >> 2, shift = 2 * (plane & 3);
    const uint32_t low = (raw.scale_low >> (scale_index < 8 ? 0 : 4)) & 15u;
    const uint32_t high = (raw.scale_high >> (2 * (scale_index >> 2))) & 3u;
    const float scale = mul(half_to_float(static_cast<uint16_t>(raw.d)),
                            static_cast<float>(static_cast<int>(low | (high << 4)) - 32));
    for (int i = 0; i < 8; ++i) {
      const int code = static_cast<int>((raw.codes.byte(i) >> shift) & 3u);
      const int bit = static_cast<int>((raw.high_bits.byte(i) >> plane) & 1u);
      y[i] = mul(scale, static_cast<float>(code - 4 + 4 * bit));
    }
  }
};

}  // namespace engram

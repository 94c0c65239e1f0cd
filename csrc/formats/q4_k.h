// Q4_K: 256 values in 144 bytes: d f16, dmin f16, scales[12] (8 scales and 8 mins of 6 bits),
// codes[128] of 4 bits. Q5_K: 176 bytes, a fifth bit in high[32] before the codes.
// y = (d * scale) * code - dmin * min.
#pragma once

#include "scalar.h"

namespace engram {

struct ScaleMin {
  uint32_t scale, min;
};

// The j-th of the eight 6-bit pairs packed in bytes a = s[j % 4], b = s[4 + j % 4], c = s[8 + j %
// 4].
ENGRAM_HD ScaleMin unpack_scale_min(int j, uint32_t a, uint32_t b, uint32_t c) {
  if (j < 4) return {a & 63u, b & 63u};
  return {(c & 15u) | ((a >> 6) << 4), (c >> 4) | ((b >> 6) << 4)};
}

template <int kHighBytes>
struct Q4KLike {
  static constexpr int kBlockValues = 256, kBlockBytes = 144 + kHighBytes;
  struct Group {
    Bytes8 codes, high_bits;
    uint32_t d_dmin, a, b, c;
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int group) {
    const int pair = group >> 3, part = group & 3, j = (group >> 2) & 3;
    Group raw;
    raw.codes = load_bytes8_aligned(block + 16 + kHighBytes + pair * 32 + part * 8);
    raw.high_bits = kHighBytes ? load_bytes8_aligned(block + 16 + part * 8) : Bytes8{{0, 0}};
    raw.d_dmin = load<uint32_t>(block);
    raw.a = load<uint8_t>(block + 4 + j);
    raw.b = load<uint8_t>(block + 8 + j);
    raw.c = load<uint8_t>(block + 12 + j);
    return raw;
  }

  ENGRAM_HD static void decode(const Group& raw, int group, float (&y)[8]) {
    const int j = group >> 2, shift = 4 * (j & 1);
    const ScaleMin pair = unpack_scale_min(j, raw.a, raw.b, raw.c);
    const float scale =
        mul(half_to_float(static_cast<uint16_t>(raw.d_dmin)), static_cast<float>(pair.scale));
    const float min =
        mul(half_to_float(static_cast<uint16_t>(raw.d_dmin >> 16)), static_cast<float>(pair.min));
    for (int i = 0; i < 8; ++i) {
      const uint32_t high = kHighBytes ? ((raw.high_bits.byte(i) >> j) & 1u) << 4 : 0u;
      const uint32_t code = ((raw.codes.byte(i) >> shift) & 15u) | high;
      y[i] = sub(mul(scale, static_cast<float>(code)), min);
    }
  }
};

using Q4K = Q4KLike<0>;
using Q5K = Q4KLike<32>;

}  // namespace engram

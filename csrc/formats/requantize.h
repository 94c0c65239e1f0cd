// The official re-quantisation of the wkv input: e4m3 per 32 values, power-of-two scale, and back.
#pragma once

#include "scalar.h"

namespace engram {

// 2^ceil(log2(max(amax, 1e-4) / 448)) by its exponent; NaN stays NaN, infinity infinity.
ENGRAM_HD float requantize_scale(float amax) {
  const float floor = amax < 1e-4f ? 1e-4f : amax;
  const uint32_t bits = float_to_bits(mul(floor, 1.0f / 448.0f));
  if (bits >= 0x7F800000u) return bits_to_float(bits);
  return bits_to_float((bits + 0x007FFFFFu) & 0x7F800000u);
}

// e4m3 nearest even of x / scale, times scale. |x / scale| <= 448 by the choice of scale.
ENGRAM_HD float requantize(float x, float scale) {
  const uint32_t scale_bits = float_to_bits(scale);
  if (scale_bits >= 0x7F800000u) return bits_to_float(0x7FC00000u);
  // A normal power of two: its reciprocal is exact and normal too.
  const float scaled = mul(x, bits_to_float(0x7F000000u - scale_bits));
  const uint32_t bits = float_to_bits(scaled);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  float code;
  if (magnitude < 0x3C800000u) {  // below 2^-6: steps of 2^-9
    const float shifted = mul(bits_to_float(magnitude), 512.0f);
    // Adding and taking away 2^23 rounds to an integer, nearest even.
    code = mul(sub(shifted + 8388608.0f, 8388608.0f), 0.001953125f);
  } else {
    code = bits_to_float((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) & 0xFFF00000u);
  }
  return mul(bits_to_float(float_to_bits(code) | (bits & 0x80000000u)), scale);
}

}  // namespace engram

// Row groups straight to packed bf16, by the cheapest way to the same bits.
#pragma once

#include "../formats/formats.h"
#include "vector.cuh"

namespace engram {

template <class Format>
__device__ __forceinline__ uint4 decode_packed(const typename Format::Group& raw, int group) {
  float y[8];
  decode_row_group<Format>(raw, group, y);
  return pack_bf16(y);
}

// Q2_K: a group has four values. They are computed and rounded once and picked by byte permute:
// byte c * 0x22 + 0x10 of a selector names bytes 2c and 2c + 1 of the eight that hold them.
template <>
__device__ __forceinline__ uint4 decode_packed<Q2K>(const Q2K::Group& raw, int group) {
  const float scale =
      mul(half_to_float(static_cast<uint16_t>(raw.d_dmin)), static_cast<float>(raw.scale & 15u));
  const float min = mul(half_to_float(static_cast<uint16_t>(raw.d_dmin >> 16)),
                        static_cast<float>(raw.scale >> 4));
  // 0 * scale is not always 0: it is NaN if the scale is infinite.
  const uint32_t low = pack_bf16(sub(mul(scale, 0.0f), min), sub(scale, min));
  const uint32_t high = pack_bf16(sub(mul(scale, 2.0f), min), sub(mul(scale, 3.0f), min));
  const int shift = 2 * ((group >> 2) & 3);
  const uint32_t a = ((raw.codes.word[0] >> shift) & 0x03030303u) * 0x22u + 0x10101010u;
  const uint32_t b = ((raw.codes.word[1] >> shift) & 0x03030303u) * 0x22u + 0x10101010u;
  return {__byte_perm(low, high, a), __byte_perm(low, high, a >> 16), __byte_perm(low, high, b),
          __byte_perm(low, high, b >> 16)};
}

}  // namespace engram

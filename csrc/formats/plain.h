// Unquantised rows: F32, F16, BF16. A "block" is a group of eight values.
#pragma once

#include "scalar.h"

namespace engram {

struct F32 {
  static constexpr int kBlockValues = 8, kBlockBytes = 32;
  struct Group {
    uint32_t word[8];
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int) {
    Group raw;
    for (int i = 0; i < 8; ++i) raw.word[i] = load<uint32_t>(block + 4 * i);
    return raw;
  }

  ENGRAM_HD static void decode(const Group& raw, int, float (&y)[8]) {
    for (int i = 0; i < 8; ++i) y[i] = bits_to_float(raw.word[i]);
  }
};

template <bool kIsBf16>
struct SixteenBit {
  static constexpr int kBlockValues = 8, kBlockBytes = 16;
  struct Group {
    uint32_t word[4];
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int) {
    Group raw;
    for (int i = 0; i < 4; ++i) raw.word[i] = load<uint32_t>(block + 4 * i);
    return raw;
  }

  ENGRAM_HD static void decode(const Group& raw, int, float (&y)[8]) {
    for (int i = 0; i < 8; ++i) {
      const uint16_t bits = static_cast<uint16_t>(raw.word[i >> 1] >> (16 * (i & 1)));
      y[i] = kIsBf16 ? bf16_to_float(bits) : half_to_float(bits);
    }
  }
};

using F16 = SixteenBit<false>;
using BF16 = SixteenBit<true>;

}  // namespace engram

// Formats of 32-value quant blocks, each with one scale.
// Q8_0: d f16, codes int8[32] = 34 bytes. MXFP4: e8m0, codes[16] of 4 bits (low nibbles first) =
// 17 bytes. E4M3_E8M0_32: e4m3[row] then e8m0[row / 32], or both apart; E4M3_F32_32: the same with
// float scales. E8M0_E4M3_32: e8m0, e4m3[32] = 33 bytes.
#pragma once

#include "scalar.h"

namespace engram {

struct Q80 {
  static constexpr int kBlockValues = 32, kBlockBytes = 34;
  struct Group {
    Bytes8 codes;
    uint32_t d;
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int group) {
    return {load_bytes8(block + 2 + group * 8), load<uint16_t>(block)};
  }

  ENGRAM_HD static void decode(const Group& raw, int, float (&y)[8]) {
    const float d = half_to_float(static_cast<uint16_t>(raw.d));
    for (int i = 0; i < 8; ++i)
      y[i] = mul(static_cast<float>(static_cast<int8_t>(raw.codes.byte(i))), d);
  }
};

struct MXFP4 {
  static constexpr int kBlockValues = 32, kBlockBytes = 17;
  struct Group {
    Bytes8 codes;
    uint32_t scale;
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int group) {
    return {load_bytes8(block + 1 + (group & 1) * 8), load<uint8_t>(block)};
  }

  // ggml's definition: integers 0 1 2 3 4 6 8 12 (twice the e2m1 value) times 2^(scale - 128);
  // scale 255 is 2^127 there, not NaN.
  ENGRAM_HD static void decode(const Group& raw, int group, float (&y)[8]) {
    const float scale =
        bits_to_float(raw.scale < 2 ? 0x00200000u << raw.scale : (raw.scale - 1) << 23);
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = (raw.codes.byte(i) >> (4 * (group >> 1))) & 15u;
      const int magnitude = static_cast<int>((0xC8643210u >> (4 * (code & 7u))) & 15u);
      y[i] = mul(scale, static_cast<float>(code & 8u ? -magnitude : magnitude));
    }
  }
};

// The block is one code each; the scales pointer is advanced by the caller (see load_row_group).
struct E4M3 {
  static constexpr int kBlockValues = 32, kBlockBytes = 32, kScaleBytes = 1;
  struct Group {
    Bytes8 codes;
    uint32_t scale;
  };

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t* scale, int group) {
    return {load_bytes8_mostly_aligned(block + group * 8), load<uint8_t>(scale)};
  }

  ENGRAM_HD static void decode(const Group& raw, int, float (&y)[8]) {
    scaled(raw.codes, e8m0_to_float(raw.scale), y);
  }

  ENGRAM_HD static void scaled(const Bytes8& codes, float scale, float (&y)[8]) {
    for (int i = 0; i < 4; ++i) {
      float low, high;
      e4m3_pair_to_float(codes.word[i >> 1] >> (16 * (i & 1)), low, high);
      y[2 * i] = mul(low, scale);
      y[2 * i + 1] = mul(high, scale);
    }
  }
};

struct E4M3F32 : E4M3 {
  static constexpr int kScaleBytes = 4;

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t* scale, int group) {
    return {load_bytes8_mostly_aligned(block + group * 8), load<uint32_t>(scale)};
  }

  ENGRAM_HD static void decode(const Group& raw, int, float (&y)[8]) {
    scaled(raw.codes, bits_to_float(raw.scale), y);
  }
};

struct E4M3Block : E4M3 {
  static constexpr int kBlockBytes = 33, kScaleBytes = 0;

  ENGRAM_HD static Group load_group(const uint8_t* block, const uint8_t*, int group) {
    return {load_bytes8(block + 1 + group * 8), load<uint8_t>(block)};
  }
};

}  // namespace engram

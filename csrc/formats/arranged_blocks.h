// Q8_0, Q4_K and Q3_K arranged, and every arranged format under one roof (see arranged.h).
//
// A stage of a tile holds one quant block (Q8_0: eight) of each of 16 outputs, the same bytes:
// Q8_0:  4352: codes [unit][lane][16], d [l / 4][unit][top, bottom] f16.
// Q4_K:  2304: codes [2 units][lane][16], then as below, d and dmin [l / 4][top, bottom] f16.
// Q3_K:  1760: low bits [4 units][lane][16], high bits [lane][16], then as below, d [l / 4][top,
//        bottom] f16.
// The 6-bit numbers of lane l: 24 bits of output l / 4 (top) and 24 of l / 4 + 8 (bottom), as one
// word [lane][4] and one half [lane][2].
#pragma once

#include "../engram.h"
#include "arranged.h"
#include "blocks32.h"
#include "q3_k.h"
#include "q4_k.h"

namespace engram {

// Bits below 2^23 as a float, exactly, in two instructions.
ENGRAM_HD float small_to_float(uint32_t word, uint32_t mask) {
#ifdef __CUDA_ARCH__
  uint32_t bits;  // one instruction: (word & mask) | 2^23
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits) : "r"(word), "r"(mask), "r"(0x4B000000u));
  return sub(bits_to_float(bits), 8388608.0f);
#else
  return sub(bits_to_float((word & mask) | 0x4B000000u), 8388608.0f);
#endif
}

// 24 bits of two outputs <-> a word and a half.
struct SixBits {
  uint32_t top, bottom;

  ENGRAM_HD static SixBits unpack(uint32_t word, uint32_t half) {
    return {word & 0xFFFFFFu, (word >> 24) | (half << 8)};
  }

  ENGRAM_HD void pack(uint8_t* word, uint8_t* half) const {
    for (int i = 0; i < 3; ++i) word[i] = static_cast<uint8_t>(top >> (8 * i));
    word[3] = static_cast<uint8_t>(bottom);
    half[0] = static_cast<uint8_t>(bottom >> 8);
    half[1] = static_cast<uint8_t>(bottom >> 16);
  }
};

struct ArrangedQ80 {
  using Block = Q80;
  static constexpr bool kTilesTogether = false;
  static constexpr int kUnitBytes = kTileOutputs * kUnitValues;
  static constexpr int kFactorsAt = kUnits * kUnitBytes;
  static constexpr int kStageBytes = kTileOutputs * kUnits * Q80::kBlockBytes;

  // Codes are kept plus 128: a byte under an exponent is 2^23 plus the byte.
  ENGRAM_HD static float code(uint32_t word, int byte) {
    return sub(bits_to_float(byte_permute(word, 0x4B000000u, 0x7440u | byte)), 8388736.0f);
  }

  // Eight codes of a lane -> the A registers of one step. d: of outputs l / 4 and l / 4 + 8
  ENGRAM_HD static void decode(uint32_t low, uint32_t high, float top, float bottom,
                               uint32_t (&a)[4]) {
    a[0] = pack_bf16x2(mul(code(low, 0), top), mul(code(low, 1), top));
    a[1] = pack_bf16x2(mul(code(low, 2), bottom), mul(code(low, 3), bottom));
    a[2] = pack_bf16x2(mul(code(high, 0), top), mul(code(high, 1), top));
    a[3] = pack_bf16x2(mul(code(high, 2), bottom), mul(code(high, 3), bottom));
  }

  // A lane's share of one stage. rows: the tile's first quant block of the stage.
  ENGRAM_HD static void arrange(const uint8_t* rows, int64_t stride, int lane, uint8_t* to) {
    for (int unit = 0; unit < kUnits; ++unit)
      for (int byte = 0; byte < 16; ++byte) {
        const FragmentPlace place = fragment_place(lane, byte % 8);
        const uint8_t* block = rows + place.output * stride + unit * Q80::kBlockBytes;
        to[unit * kUnitBytes + lane * 16 + byte] =
            static_cast<uint8_t>(block[2 + byte / 8 * 16 + place.k] ^ 0x80u);
      }
    if (lane % 4 != 0) return;
    for (int unit = 0; unit < kUnits; ++unit)
      for (int i = 0; i < 4; ++i)
        to[kFactorsAt + lane / 4 * 32 + unit * 4 + i] =
            rows[(lane / 4 + i / 2 * 8) * stride + unit * Q80::kBlockBytes + i % 2];
  }
};

struct ArrangedQ4K {
  using Block = Q4K;
  static constexpr bool kTilesTogether = true;
  static constexpr int kScalesAt = 2048, kHalvesAt = 2176, kFactorsAt = 2240;
  static constexpr int kStageBytes = kTileOutputs * Q4K::kBlockBytes;

  // scale and min of a unit for outputs l / 4 (top) and l / 4 + 8, bottom_scale times 2^-8: the
  // place of its nibbles.
  struct Values {
    float scale, min, bottom_scale, bottom_min;
  };

  // Lane l % 4 computes the values of units 2 (l % 4) (part 0) and 2 (l % 4) + 1 (part 1).
  ENGRAM_HD static Values values(const SixBits& bits, int part, uint32_t top, uint32_t bottom) {
    const auto six = [&](uint32_t word, int at) { return small_to_float(word >> at, 63u); };
    return {mul(factor(top), six(bits.top, 12 * part)),
            mul(factor(top >> 16), six(bits.top, 12 * part + 6)),
            mul(mul(factor(bottom), 0x1p-8f), six(bits.bottom, 12 * part)),
            mul(factor(bottom >> 16), six(bits.bottom, 12 * part + 6))};
  }

  // Nibble v of a word is value v of the lane: the A registers of one step. scale * code has 21
  // significant bits at most: exact, so the fused form rounds where quant.py's difference does.
  ENGRAM_HD static void decode(uint32_t word, const Values& y, uint32_t (&a)[4]) {
    const float second = mul(y.scale, 0x1p-4f), bottom_second = mul(y.bottom_scale, 0x1p-4f);
    for (int half = 0; half < 2; ++half) {
      const uint32_t bits = word >> (16 * half);
      a[2 * half] = pack_bf16x2(fused_sub(y.scale, small_to_float(bits, 0xFu), y.min),
                                fused_sub(second, small_to_float(bits, 0xF0u), y.min));
      a[2 * half + 1] =
          pack_bf16x2(fused_sub(y.bottom_scale, small_to_float(bits, 0xF00u), y.bottom_min),
                      fused_sub(bottom_second, small_to_float(bits, 0xF000u), y.bottom_min));
    }
  }

  ENGRAM_HD static void arrange(const uint8_t* rows, int64_t stride, int lane, uint8_t* to) {
    for (int word = 0; word < 16; ++word)  // unit word / 2, step word % 2
      for (int byte = 0; byte < 4; ++byte) {
        uint32_t bits = 0;
        for (int i = 0; i < 2; ++i) {
          const FragmentPlace place = fragment_place(lane, byte * 2 + i);
          const int unit = word / 2, k = word % 2 * 16 + place.k;
          const uint8_t* block = rows + place.output * stride;
          bits |= ((block[16 + unit / 2 * 32 + k] >> (4 * (unit & 1))) & 15u) << (4 * i);
        }
        to[word / 4 * 512 + lane * 16 + word % 4 * 4 + byte] = static_cast<uint8_t>(bits);
      }
    const uint8_t* top = rows + lane / 4 * stride;
    const SixBits six{pairs(top, lane % 4), pairs(top + 8 * stride, lane % 4)};
    six.pack(to + kScalesAt + lane * 4, to + kHalvesAt + lane * 2);
    if (lane % 4 != 0) return;
    for (int i = 0; i < 8; ++i) to[kFactorsAt + lane * 2 + i] = top[i / 4 * 8 * stride + i % 4];
  }

 private:
  ENGRAM_HD static float factor(uint32_t bits) {
    return half_to_float(static_cast<uint16_t>(bits));
  }

  // scale, min, scale, min of units 2 part and 2 part + 1
  ENGRAM_HD static uint32_t pairs(const uint8_t* block, int part) {
    uint32_t bits = 0;
    for (int i = 0; i < 2; ++i) {
      const int j = 2 * part + i;
      const uint8_t* s = block + 4 + j % 4;
      const ScaleMin pair = unpack_scale_min(j, s[0], s[4], s[8]);
      bits |= (pair.scale | (pair.min << 6)) << (12 * i);
    }
    return bits;
  }
};

struct ArrangedQ3K {
  using Block = Q3K;
  static constexpr bool kTilesTogether = false;
  static constexpr int kHighAt = 1024, kScalesAt = 1536, kHalvesAt = 1664, kFactorsAt = 1728;
  static constexpr int kStageBytes = kTileOutputs * Q3K::kBlockBytes;

  // The eight values of a 16-group, bytes apart: low bytes of codes 0..3 and 4..7, then high ones.
  struct Values {
    uint32_t low[2], high[2];
  };

  // six: the group's scale (bits 0..5); d: f16
  ENGRAM_HD static Values values(uint32_t six, uint32_t d) {
    const float scale =
        mul(half_to_float(static_cast<uint16_t>(d)), sub(small_to_float(six, 63u), 32.0f));
    Values y;
    for (int i = 0; i < 2; ++i) {
      const float first = i ? 0.0f : -4.0f;
      const uint32_t a = pack_bf16x2(mul(scale, first), mul(scale, first + 1.0f));
      const uint32_t b = pack_bf16x2(mul(scale, first + 2.0f), mul(scale, first + 3.0f));
      y.low[i] = byte_permute(a, b, 0x6420u);
      y.high[i] = byte_permute(a, b, 0x7531u);
    }
    return y;
  }

  // Codes of one step as selectors. low: the unit's word, nibble v holding the two low bits of
  // value v of step 0 and, above them, of step 1; high: bit step of nibble v, steps of two units
  ENGRAM_HD static uint32_t selectors(uint32_t low, int step, uint32_t high, int high_step) {
    const uint32_t moved = high_step < 2    ? high << (2 - high_step)
                           : high_step == 2 ? high
                                            : high >> 1;
    return ((low >> (2 * step)) & 0x33333333u) | (moved & 0x44444444u);
  }

  // Nibbles 0..3: values of the top output, 4..7: of the bottom one (see place_of_nibble).
  ENGRAM_HD static void decode(uint32_t selectors, const Values& top, const Values& bottom,
                               uint32_t (&a)[4]) {
    select(selectors, top, a[0], a[2]);
    select(selectors >> 16, bottom, a[1], a[3]);
  }

  ENGRAM_HD static void arrange(const uint8_t* rows, int64_t stride, int lane, uint8_t* to) {
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t low = 0;
      for (int step = 0; step < 2; ++step)
        for (int nibble = 0; nibble < 8; ++nibble)
          low |= (code_of(rows, stride, lane, unit * 2 + step, nibble) & 3u)
                 << (4 * nibble + 2 * step);
      put_word(to + unit / 4 * 512 + lane * 16 + unit % 4 * 4, low);
    }
    for (int word = 0; word < 4; ++word) {
      uint32_t high = 0;
      for (int step = 0; step < 4; ++step)
        for (int nibble = 0; nibble < 8; ++nibble)
          high |= (code_of(rows, stride, lane, word * 4 + step, nibble) >> 2)
                  << (4 * nibble + step);
      put_word(to + kHighAt + lane * 16 + word * 4, high);
    }
    const uint8_t* top = rows + lane / 4 * stride;
    const SixBits six{scales(top, lane % 4), scales(top + 8 * stride, lane % 4)};
    six.pack(to + kScalesAt + lane * 4, to + kHalvesAt + lane * 2);
    if (lane % 4 != 0) return;
    for (int i = 0; i < 4; ++i) to[kFactorsAt + lane + i] = top[i / 2 * 8 * stride + 108 + i % 2];
  }

 private:
  ENGRAM_HD static void select(uint32_t selectors, const Values& y, uint32_t& first,
                               uint32_t& second) {
    const uint32_t low = byte_permute(y.low[0], y.low[1], selectors);
    const uint32_t high = byte_permute(y.high[0], y.high[1], selectors);
    first = byte_permute(low, high, 0x5140u);
    second = byte_permute(low, high, 0x7362u);
  }

  ENGRAM_HD static void put_word(uint8_t* to, uint32_t word) {
    for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }

  // Nibbles 0..3 are values 0, 1, 4, 5 (the top output), nibbles 4..7 values 2, 3, 6, 7.
  ENGRAM_HD static uint32_t code_of(const uint8_t* rows, int64_t stride, int lane, int step,
                                    int nibble) {
    const FragmentPlace place =
        fragment_place(lane, nibble % 2 + nibble / 2 % 2 * 4 + nibble / 4 * 2);
    const uint8_t* block = rows + place.output * stride;
    const int k = step * 16 + place.k, plane = k / 32;
    const uint32_t low = (block[32 + k / 128 * 32 + k % 32] >> (2 * (plane & 3))) & 3u;
    return low | (((block[k % 32] >> plane) & 1u) << 2);
  }

  // of 16-groups part, part + 4, part + 8, part + 12
  ENGRAM_HD static uint32_t scales(const uint8_t* block, int part) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) {
      const int group = 4 * i + part;
      const uint32_t low = (block[96 + (group & 7)] >> (group < 8 ? 0 : 4)) & 15u;
      const uint32_t high = (block[104 + (group & 3)] >> (2 * (group >> 2))) & 3u;
      bits |= (low | (high << 4)) << (6 * i);
    }
    return bits;
  }
};

// Formats whose quant blocks are arranged stage by stage (E4M3, with its scales apart, is not).
// Calls visitor(ArrangedX{}); false if there is none.
template <class Visitor>
bool visit_arranged_blocks(int32_t format, Visitor&& visitor) {
  switch (format) {
    case ENGRAM_Q8_0:
      visitor(ArrangedQ80{});
      return true;
    case ENGRAM_Q2_K:
      visitor(ArrangedQ2K{});
      return true;
    case ENGRAM_Q3_K:
      visitor(ArrangedQ3K{});
      return true;
    case ENGRAM_Q4_K:
      visitor(ArrangedQ4K{});
      return true;
    default:
      return false;
  }
}

// Bytes of wkv arranged; -1 where this format or these sizes are not.
inline int64_t arranged_bytes(int32_t format, int64_t out_features, int64_t in_features) {
  if (out_features <= 0 || out_features % 32 != 0) return -1;
  if (in_features <= 0 || in_features % kStageValues != 0) return -1;
  const int64_t count = out_features * in_features;
  if (format == ENGRAM_E4M3_E8M0_32) return count / 1024 * 1025;
  int64_t bytes = -1;
  visit_arranged_blocks(format, [&](auto arranged) {
    bytes = count / (kTileOutputs * kStageValues) * decltype(arranged)::kStageBytes;
  });
  return bytes;
}

}  // namespace engram

// wkv as stored, its bytes in the order in which mma.sync.m16n8k16 takes them, and the way from a
// lane's bytes to its registers. Arranging loses nothing and adds nothing: the same bytes.
//
// A tile is 16 outputs, a stage 256 of k. Value v of lane l in a step of 16 k:
//   output l / 4 + 8 * (v / 2 % 2), k = l % 4 * 2 + v % 2 + 8 * (v / 4): register v / 2, low half
// first. A warp reads its tile stage by stage, 16 bytes a lane.
//
// E4M3:  [stage][tile][unit of 32 k][lane][16 bytes], then the scales as they were,
//        [n / 32][k / 32].
// Q2_K:  [tile][stage] of 1344 bytes: codes [2][lane][16], scales [lane][8], d and dmin [l / 4][8].
// Q8_0, Q3_K, Q4_K: arranged_blocks.h.
#pragma once

#include "q2_k.h"
#include "scalar.h"

namespace engram {

constexpr int kTileOutputs = 16, kStageValues = 256, kUnitValues = 32;
constexpr int kUnits = kStageValues / kUnitValues;  // of 32 k a stage, two steps of 16 each

// Where a stage of a tile lies. Tiles together: those of a stage follow each other, so that warps
// which go through k side by side read one stretch of memory. It pays where kernels wait for bytes
// (E4M3: 1 us of 42); where they compute, a step known to the compiler does.
template <class Arranged>
ENGRAM_HD int64_t stage_at(int64_t tile, int64_t stage, int64_t num_tiles, int64_t num_stages) {
  return (Arranged::kTilesTogether ? stage * num_tiles + tile : tile * num_stages + stage) *
         Arranged::kStageBytes;
}

struct FragmentPlace {
  int output, k;
};

ENGRAM_HD FragmentPlace fragment_place(int lane, int value) {
  return {lane / 4 + 8 * (value / 2 % 2), lane % 4 * 2 + value % 2 + 8 * (value / 4)};
}

// Byte i of the result is the byte of high:low that nibble i of the selector names (0..7 each; not
// __byte_perm, which masks them first: an instruction a register).
ENGRAM_HD uint32_t byte_permute(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  const uint64_t bytes = (static_cast<uint64_t>(high) << 32) | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7u))) & 0xFFu)
              << (8 * i);
  return result;
#endif
}

// Both halves times both halves, rounded once to nearest even, subnormals kept.
ENGRAM_HD uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t product;  // there is no mul.bf16x2 before 9.0; adding -0 changes no product
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
#else
  const auto half = [](uint32_t x, uint32_t y) {
    return static_cast<uint32_t>(float_to_bf16(
        mul(bf16_to_float(static_cast<uint16_t>(x)), bf16_to_float(static_cast<uint16_t>(y)))));
  };
  return half(a & 0xFFFFu, b & 0xFFFFu) | (half(a >> 16, b >> 16) << 16);
#endif
}

ENGRAM_HD uint32_t pack_bf16x2(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_bf16(low) | (static_cast<uint32_t>(float_to_bf16(high)) << 16);
#endif
}

// a * b - c, rounded once.
ENGRAM_HD float fused_sub(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, -c);
#else
  return __builtin_fmaf(a, b, -c);
#endif
}

struct ArrangedE4M3 {
  static constexpr bool kTilesTogether = true;
  static constexpr int kUnitBytes = kTileOutputs * kUnitValues;
  static constexpr int kStageBytes = kUnits * kUnitBytes;
  static constexpr uint32_t kLargestScale = 134;  // 2^7

  // The bf16 whose exponent and mantissa end in a code's seven bits is the code's value times
  // 2^-120, subnormal or not. So one product, by 2^(scale - 127 + 120), gives what rounding the
  // dequantised value once to bf16 gives. It does not for NaN codes, nor for factors beyond bf16:
  // weights that hold such are not served from here (see is_plain).
  ENGRAM_HD static bool is_plain(uint32_t code) { return (code & 0x7Fu) != 0x7Fu; }
  ENGRAM_HD static bool is_plain_scale(uint32_t scale) { return scale <= kLargestScale; }
  ENGRAM_HD static uint32_t factor(uint32_t scale) { return (scale + 120u) * 0x00800080u; }

  // The bits of the code that is byte `byte` of a word, where decode_word looks for them: codes 1
  // and 3 lie in place, each in a half; codes 0 and 2 fill the gaps.
  ENGRAM_HD static uint32_t in_word(uint32_t code, int byte) {
    const uint32_t half = byte % 2 ? (code & 0x80u) << 8 | (code & 0x7Fu) << 4
                                   : (code & 0x80u) << 4 | (code & 0x70u) << 8 | (code & 0x0Fu);
    return half << (byte / 2 * 16);
  }

  // Codes 1 and 3, then codes 0 and 2.
  ENGRAM_HD static void decode_word(uint32_t word, uint32_t factor, uint32_t& odd, uint32_t& even) {
    odd = mul_bf16x2(word & 0x87F087F0u, factor);
    even = mul_bf16x2(((word << 4) & 0x80F080F0u) | ((word >> 4) & 0x07000700u), factor);
  }

  // Eight codes of a lane -> the A registers of one step.
  ENGRAM_HD static void decode(uint32_t low, uint32_t high, uint32_t factor, uint32_t (&a)[4]) {
    decode_word(low, factor, a[0], a[1]);
    decode_word(high, factor, a[2], a[3]);
  }

  // Where in the tile's unit byte `byte` of a lane's 16 comes from.
  ENGRAM_HD static FragmentPlace place_of_byte(int lane, int byte) {
    const int in_word = byte % 4;  // odd bytes: the register of output l / 4
    const int v = byte / 4 % 2 * 4 + (1 - in_word % 2) * 2 + in_word / 2;
    const FragmentPlace place = fragment_place(lane, v);
    return {place.output, byte / 8 * 16 + place.k};
  }

  struct Unit {
    uint32_t word[4];
    bool is_plain;
  };

  // A lane's share of one unit. rows: the tile's first code of the unit.
  ENGRAM_HD static Unit arrange(const uint8_t* rows, int64_t stride, int lane) {
    Unit unit{{0, 0, 0, 0}, true};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int byte = 0; byte < 16; ++byte) {
      const FragmentPlace place = place_of_byte(lane, byte);
      const uint32_t code = rows[place.output * stride + place.k];
      unit.word[byte / 4] |= in_word(code, byte % 4);
      unit.is_plain &= is_plain(code);
    }
    return unit;
  }
};

struct ArrangedQ2K {
  using Block = Q2K;
  static constexpr bool kTilesTogether = false;
  static constexpr int kStageBytes = kTileOutputs * Q2K::kBlockBytes;
  static constexpr int kScalesAt = 1024, kFactorsAt = 1280;

  // d and dmin of one output, times the powers of two that nibble() leaves out.
  struct Factors {
    float d[2], dmin[2];  // for nibbles at bits 0 and 8; at bits 4 and 12
  };

  ENGRAM_HD static Factors factors(uint32_t d_dmin) {
    const float d = half_to_float(static_cast<uint16_t>(d_dmin));
    const float dmin = half_to_float(static_cast<uint16_t>(d_dmin >> 16));
    return {{mul(d, 0x1p49f), mul(d, 0x1p41f)}, {mul(dmin, 0x1p45f), mul(dmin, 0x1p37f)}};
  }

  // The nibble at bit `at` of a word, times 2^(at - 49). Bits below 2^24 read as a float are that
  // integer times 2^-149 (a subnormal): no conversion, and one instruction to cut it out.
  ENGRAM_HD static float nibble(uint32_t word, int at) {
    return mul(bits_to_float(word & (15u << at)), 0x1p100f);
  }

  struct Values {
    uint32_t low, high;  // bf16 of codes 0 and 1, of 2 and 3
  };

  // The four values of a group whose scale byte is the low (part 0) or second (part 1) of `word`.
  // scale * code has 17 significant bits at most: exact, so the fused form rounds where
  // quant.py's product and difference round, once, signs of zero included.
  ENGRAM_HD static Values values(uint32_t word, int part, const Factors& f) {
    const float scale = mul(nibble(word, 8 * part), f.d[part]);
    const float min = mul(nibble(word, 8 * part + 4), f.dmin[part]);
    return {pack_bf16x2(fused_sub(scale, 0.0f, min), fused_sub(scale, 1.0f, min)),
            pack_bf16x2(fused_sub(scale, 2.0f, min), fused_sub(scale, 3.0f, min))};
  }

  // Chunk c of a word is step c / 2 of its unit, outputs of half c % 2; its four codes are the two
  // of the register of k < 8 and the two of that of k >= 8. Even chunks have them in bits 0-1,
  // 14-15, 16-17 and 30-31, odd ones in bits 8-9, 6-7, 24-25 and 22-23; chunks 2 and 3 after a
  // rotation by four. So one mask cuts a chunk out, and one dot product of bytes makes a selector.
  ENGRAM_HD static int bit_of(int chunk, int half, int element) {
    const int at = chunk % 2 == 0 ? element * 14 : 8 - element * 2;
    return (at + half * 16 + chunk / 2 * 4) % 32;
  }

  // Byte c * 0x22 + 0x10 of a selector names bytes 2c and 2c + 1 of the eight that hold the values.
  ENGRAM_HD static uint32_t selectors(uint32_t codes, uint32_t weights) {
#ifdef __CUDA_ARCH__
    uint32_t sum;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(codes), "r"(weights), "r"(0x1010u));
    return sum;
#else
    uint32_t sum = 0x1010u;
    for (int i = 0; i < 32; i += 8) sum += ((codes >> i) & 0xFFu) * ((weights >> i) & 0xFFu);
    return sum;
#endif
  }

  ENGRAM_HD static void select(uint32_t word, int chunk, const Values& y, uint32_t& first,
                               uint32_t& second) {
    const bool is_odd = chunk % 2 == 1;
    const uint32_t turned = chunk < 2 ? word : word >> 4 | word << 28;
    const uint32_t codes = turned & (is_odd ? 0x03C003C0u : 0xC003C003u);
    const uint32_t weights = is_odd ? 0x2288u : 0x8822u;
    first = byte_permute(y.low, y.high, selectors(codes, weights));
    second = byte_permute(y.low, y.high, selectors(codes, weights << 16));
  }

  // The A registers of step 0 or 1 of a word; top and bottom: values of outputs l / 4, l / 4 + 8.
  ENGRAM_HD static void decode(uint32_t word, int step, const Values& top, const Values& bottom,
                               uint32_t (&a)[4]) {
    select(word, step * 2, top, a[0], a[2]);
    select(word, step * 2 + 1, bottom, a[1], a[3]);
  }

  // A lane's share of one stage. rows: the tile's first quant block of the stage.
  ENGRAM_HD static void arrange(const uint8_t* rows, int64_t stride, int lane, uint8_t* to) {
    for (int word = 0; word < 8; ++word) {
      uint32_t bits = 0;
      for (int code = 0; code < 16; ++code) {
        const int chunk = code / 4, half = code / 2 % 2, element = code % 2;
        const FragmentPlace place = fragment_place(lane, half * 4 + chunk % 2 * 2 + element);
        const int k = word * 32 + chunk / 2 * 16 + place.k;
        const uint8_t* block = rows + place.output * stride;
        const uint32_t value = (block[16 + k / 128 * 32 + k % 32] >> (2 * (k % 128 / 32))) & 3u;
        bits |= value << bit_of(chunk, half, element);
      }
      for (int byte = 0; byte < 4; ++byte)
        to[word / 4 * 512 + lane * 16 + word % 4 * 4 + byte] =
            static_cast<uint8_t>(bits >> (8 * byte));
    }
    const uint8_t* top = rows + lane / 4 * stride;
    const uint8_t* bottom = top + 8 * stride;
    for (int i = 0; i < 4; ++i) {
      to[kScalesAt + lane * 8 + i] = top[i * 4 + lane % 4];
      to[kScalesAt + lane * 8 + 4 + i] = bottom[i * 4 + lane % 4];
    }
    if (lane % 4 == 0)
      for (int i = 0; i < 4; ++i) {
        to[kFactorsAt + lane * 2 + i] = top[80 + i];
        to[kFactorsAt + lane * 2 + 4 + i] = bottom[80 + i];
      }
  }
};

}  // namespace engram

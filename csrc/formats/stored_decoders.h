// From a lane's bytes of wkv as stored to the A registers of tensor-core steps, by format. Where
// the bytes come from, and how early they are asked for, is for the streams to say
// (cuda/stored_streams.cuh: device memory; cuda/shared_streams.cuh: shared memory).
//
// A stage (256 of k of a tile of 16 outputs, arranged.h) is codes and the rest:
//   codes  16 bytes a lane for kCodeUnits units of 32 k; those of unit u at
//          u / kCodeUnits * 512 + lane * 16
//   rest   what units share: scales, mins, d. In kRestParts loads, each of an equal part of the
//          units; kRestEndsAtBegin: used up as soon as the stage has begun
// start() is given the warp's part of shared memory for an Exchange (cuda/exchange.cuh), begin()
// turns to a stage, decode<unit>() makes two steps' registers. Four lanes have the same two
// outputs: what a quant group needs (its values, or scale and min) is computed by one of them and
// handed to the other three.
//
// Device code that the host's tests compile, too.
#pragma once

#include "arranged_blocks.h"

#ifdef __CUDACC__
#define ENGRAM_DEVICE __device__ __forceinline__
#else
#define ENGRAM_DEVICE inline
#endif

namespace engram {

#ifndef __CUDACC__
struct uint2 {
  uint32_t x, y;
};

struct uint4 {
  uint32_t x, y, z, w;
};
#endif

template <int kIndex>
ENGRAM_DEVICE uint32_t word_of(const uint4& v) {
  return kIndex == 0 ? v.x : kIndex == 1 ? v.y : kIndex == 2 ? v.z : v.w;
}

// Its scales lie behind all codes, a byte a unit, shared by the 32 outputs around: no load_rest.
struct E4M3Decoder {
  using Arranged = ArrangedE4M3;
  static constexpr int kCodeUnits = 1, kRestParts = 1, kExchangeBytes = 0;
  static constexpr bool kRestEndsAtBegin = true;

  struct Rest {
    uint2 scales;
  };

  uint2 scales;

  ENGRAM_DEVICE void start(uint32_t, int) {}
  ENGRAM_DEVICE void begin(const Rest& rest) { scales = rest.scales; }

  template <int kUnit>
  ENGRAM_DEVICE void decode(const uint4& codes, const Rest&, uint32_t (&a)[2][4]) {
    const uint32_t word = kUnit < 4 ? scales.x : scales.y;
    const uint32_t factor = ArrangedE4M3::factor((word >> (8 * (kUnit % 4))) & 0xFFu);
    ArrangedE4M3::decode(codes.x, codes.y, factor, a[0]);
    ArrangedE4M3::decode(codes.z, codes.w, factor, a[1]);
  }
};

template <class Decoder>
constexpr bool kAreScalesApart = false;
template <>
constexpr bool kAreScalesApart<E4M3Decoder> = true;

struct Q80Decoder {
  using Arranged = ArrangedQ80;
  static constexpr int kCodeUnits = 1, kRestParts = 2, kExchangeBytes = 0;
  static constexpr bool kRestEndsAtBegin = false;

  struct Rest {
    uint4 factors[2];  // of four units each, of the lane's two outputs
  };

  template <int kPart, class Bytes>
  ENGRAM_DEVICE static void load_rest(Rest& rest, Bytes stage, int lane) {
    rest.factors[kPart] = stage.load16(ArrangedQ80::kFactorsAt + lane / 4 * 32 + kPart * 16);
  }

  ENGRAM_DEVICE void start(uint32_t, int) {}
  ENGRAM_DEVICE void begin(const Rest&) {}

  template <int kUnit>
  ENGRAM_DEVICE void decode(const uint4& codes, const Rest& rest, uint32_t (&a)[2][4]) {
    const uint32_t pair = word_of<kUnit % 4>(rest.factors[kUnit / 4]);
    const float top = half_to_float(static_cast<uint16_t>(pair));
    const float bottom = half_to_float(static_cast<uint16_t>(pair >> 16));
    ArrangedQ80::decode(codes.x, codes.y, top, bottom, a[0]);
    ArrangedQ80::decode(codes.z, codes.w, top, bottom, a[1]);
  }
};

template <template <int> class Exchange>
struct Q2KDecoder {
  using Arranged = ArrangedQ2K;
  static constexpr int kCodeUnits = 4, kRestParts = 1, kExchangeBytes = Exchange<4>::kBytes;
  static constexpr bool kRestEndsAtBegin = false;

  struct Rest {
    uint2 scales, d;
  };

  template <int kPart, class Bytes>
  ENGRAM_DEVICE static void load_rest(Rest& rest, Bytes stage, int lane) {
    rest.scales = stage.load8(ArrangedQ2K::kScalesAt + lane * 8);
    rest.d = stage.load8(ArrangedQ2K::kFactorsAt + lane / 4 * 8);
  }

  ArrangedQ2K::Factors top, bottom;
  Exchange<4> exchange;

  ENGRAM_DEVICE void start(uint32_t shared, int lane) { exchange.start(shared, lane); }

  ENGRAM_DEVICE void begin(const Rest& rest) {
    top = ArrangedQ2K::factors(rest.d.x);
    bottom = ArrangedQ2K::factors(rest.d.y);
  }

  template <int kUnit>
  ENGRAM_DEVICE void decode(const uint4& codes, const Rest& rest, uint32_t (&a)[2][4]) {
    constexpr int kQuarter = kUnit / 2;  // of the stage: four groups, one a lane of four
    if (kUnit % 2 == 0) {
      const int shift = kQuarter / 2 * 16;
      const auto y = ArrangedQ2K::values(rest.scales.x >> shift, kQuarter % 2, top);
      const auto z = ArrangedQ2K::values(rest.scales.y >> shift, kQuarter % 2, bottom);
      exchange.put(kQuarter % 2, {y.low, y.high, z.low, z.high});
    }
    const uint32_t word = word_of<kUnit % 4>(codes);
    step<kUnit, 0>(word, a[0]);
    step<kUnit, 1>(word, a[1]);
  }

 private:
  template <int kUnit, int kStep>
  ENGRAM_DEVICE void step(uint32_t word, uint32_t (&a)[4]) {
    uint32_t y[4];
    exchange.template get<0, kUnit % 2 * 2 + kStep>(kUnit / 2 % 2, y);
    ArrangedQ2K::decode(word, kStep, {y[0], y[1]}, {y[2], y[3]}, a);
  }
};

template <template <int> class Exchange>
struct Q3KDecoder {
  using Arranged = ArrangedQ3K;
  static constexpr int kCodeUnits = 4, kRestParts = 1, kExchangeBytes = Exchange<8>::kBytes;
  static constexpr bool kRestEndsAtBegin = false;

  struct Rest {
    uint4 high;  // the third bits of all codes
    uint32_t six, half, d;
  };

  template <int kPart, class Bytes>
  ENGRAM_DEVICE static void load_rest(Rest& rest, Bytes stage, int lane) {
    rest.high = stage.load16(ArrangedQ3K::kHighAt + lane * 16);
    rest.six = stage.load4(ArrangedQ3K::kScalesAt + lane * 4);
    rest.half = stage.load2(ArrangedQ3K::kHalvesAt + lane * 2);
    rest.d = stage.load4(ArrangedQ3K::kFactorsAt + lane / 4 * 4);
  }

  SixBits six;
  Exchange<8> exchange;

  ENGRAM_DEVICE void start(uint32_t shared, int lane) { exchange.start(shared, lane); }

  ENGRAM_DEVICE void begin(const Rest& rest) { six = SixBits::unpack(rest.six, rest.half); }

  template <int kUnit>
  ENGRAM_DEVICE void decode(const uint4& codes, const Rest& rest, uint32_t (&a)[2][4]) {
    constexpr int kQuarter = kUnit / 2;
    if (kUnit % 2 == 0) {
      const auto y = ArrangedQ3K::values(six.top >> (6 * kQuarter), rest.d);
      const auto z = ArrangedQ3K::values(six.bottom >> (6 * kQuarter), rest.d >> 16);
      exchange.put(kQuarter % 2, {y.low[0], y.low[1], y.high[0], y.high[1], z.low[0], z.low[1],
                                  z.high[0], z.high[1]});
    }
    const uint32_t low = word_of<kUnit % 4>(codes), high = word_of<kUnit / 2>(rest.high);
    step<kUnit, 0>(low, high, a[0]);
    step<kUnit, 1>(low, high, a[1]);
  }

 private:
  template <int kUnit, int kStep>
  ENGRAM_DEVICE void step(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    constexpr int kOwner = kUnit % 2 * 2 + kStep;
    uint32_t y[8];
    exchange.template get<0, kOwner>(kUnit / 2 % 2, y);
    ArrangedQ3K::decode(ArrangedQ3K::selectors(low, kStep, high, kOwner),
                        {{y[0], y[1]}, {y[2], y[3]}}, {{y[4], y[5]}, {y[6], y[7]}}, a);
  }
};

template <template <int> class Exchange>
struct Q4KDecoder {
  using Arranged = ArrangedQ4K;
  static constexpr int kCodeUnits = 2, kRestParts = 1, kExchangeBytes = Exchange<8>::kBytes;
  static constexpr bool kRestEndsAtBegin = true;

  struct Rest {
    uint32_t six, half;
    uint2 d;
  };

  template <int kPart, class Bytes>
  ENGRAM_DEVICE static void load_rest(Rest& rest, Bytes stage, int lane) {
    rest.six = stage.load4(ArrangedQ4K::kScalesAt + lane * 4);
    rest.half = stage.load2(ArrangedQ4K::kHalvesAt + lane * 2);
    rest.d = stage.load8(ArrangedQ4K::kFactorsAt + lane / 4 * 8);
  }

  Exchange<8> exchange;
  int parity;  // of the stage: which half the exchange is in

  ENGRAM_DEVICE void start(uint32_t shared, int lane) {
    exchange.start(shared, lane);
    parity = 0;
  }

  ENGRAM_DEVICE void begin(const Rest& rest) {
    parity ^= 1;
    const SixBits bits = SixBits::unpack(rest.six, rest.half);
    uint32_t words[8];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int part = 0; part < 2; ++part) {
      const auto y = ArrangedQ4K::values(bits, part, rest.d.x, rest.d.y);
      words[part * 4] = float_to_bits(y.scale);
      words[part * 4 + 1] = float_to_bits(y.min);
      words[part * 4 + 2] = float_to_bits(y.bottom_scale);
      words[part * 4 + 3] = float_to_bits(y.bottom_min);
    }
    exchange.put(parity, words);
  }

  template <int kUnit>
  ENGRAM_DEVICE void decode(const uint4& codes, const Rest&, uint32_t (&a)[2][4]) {
    uint32_t y[4];
    exchange.template get<kUnit % 2 * 4, kUnit / 2>(parity, y);
    const ArrangedQ4K::Values values = {bits_to_float(y[0]), bits_to_float(y[1]),
                                        bits_to_float(y[2]), bits_to_float(y[3])};
    ArrangedQ4K::decode(word_of<kUnit % 2 * 2>(codes), values, a[0]);
    ArrangedQ4K::decode(word_of<kUnit % 2 * 2 + 1>(codes), values, a[1]);
  }
};

}  // namespace engram

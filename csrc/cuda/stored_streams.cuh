// wkv as stored, on its way from device memory to the A registers of a tensor-core step, by format.
//
// A stream is a lane's view of one tile of 16 outputs (formats/arranged.h): start() asks for the
// first weights, begin_stage() turns to the next 256 of k and asks for those kAhead stages later,
// decode<unit>() makes the registers of 32 of k (kIsAlone: by a caller that leaves other units of
// each stage to other warps, and has said so to start()). Four lanes have the same two outputs:
// what a quant group needs (its values, or scale and min) is computed by one of them and handed to
// the other three by an Exchange.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../engram.h"
#include "../formats/arranged_blocks.h"
#include "slots.cuh"

namespace engram {

struct StoredArgs {
  const __nv_bfloat16* rows;
  const uint8_t* wkv;
  __nv_bfloat16* kv;
  int64_t num_tokens, in_features, out_features;
  SlotList list;
};

// Weights are read once: past L1.
__device__ __forceinline__ uint4 stream16(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint2 stream8(const uint8_t* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t stream4(const uint8_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t stream2(const uint8_t* p) {
  uint16_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

template <int kIndex>
__device__ __forceinline__ uint32_t word_of(const uint4& v) {
  return kIndex == 0 ? v.x : kIndex == 1 ? v.y : kIndex == 2 ? v.z : v.w;
}

// kWords of each lane, read by the four lanes of its group: lane l's from lane l / 4 * 4 + owner.
template <int kWords>
struct ByShuffle {
  static constexpr int kBytes = 0;
  uint32_t mine[kWords];

  __device__ __forceinline__ void start(uint32_t, int) {}

  __device__ __forceinline__ void put(int, const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) mine[i] = words[i];
  }

  template <int kFirst, int kOwner, int kCount>
  __device__ __forceinline__ void get(int, uint32_t (&words)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      words[i] = __shfl_sync(0xFFFFFFFFu, mine[kFirst + i], kOwner, 4);
  }
};

// The same through kBytes of shared memory a warp: a shuffle costs as much there as 16 bytes do.
// Two halves in turn (`turn`), so that one __syncwarp a put is enough. Swizzled so that neither
// side meets bank conflicts.
template <int kWords>
struct BySharedMemory {
  static constexpr int kChunks = kWords / 4, kHalf = kChunks * 512, kBytes = 2 * kHalf;
  uint32_t to, from[4];

  __device__ __forceinline__ void start(uint32_t shared, int lane) {
    to = address(shared, lane / 4, lane % 4);
#pragma unroll
    for (int owner = 0; owner < 4; ++owner) from[owner] = address(shared, lane / 4, owner);
  }

  __device__ __forceinline__ void put(int turn, const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + turn * kHalf +
                                                                   chunk * 512),
                   "r"(words[chunk * 4]), "r"(words[chunk * 4 + 1]), "r"(words[chunk * 4 + 2]),
                   "r"(words[chunk * 4 + 3])
                   : "memory");
    __syncwarp();
  }

  template <int kFirst, int kOwner, int kCount>
  __device__ __forceinline__ void get(int turn, uint32_t (&words)[kCount]) const {
    static_assert(kFirst % 4 == 0 && kCount % 4 == 0, "whole chunks");
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "r"(from[kOwner] + turn * kHalf + (kFirst + i) / 4 * 512));
  }

 private:
  __device__ __forceinline__ static uint32_t address(uint32_t shared, int group, int owner) {
    return shared + (owner * 8 + (group ^ (2 * owner))) * 16;
  }
};

// Eight units in flight, each replaced as it is used up.
struct E4M3Stream {
  static constexpr int kStageBytes = ArrangedE4M3::kStageBytes;
  static constexpr int kAhead = 1, kExchangeBytes = 0;
  const uint8_t* codes;
  const uint8_t* scales;
  uint4 unit[kUnits];
  uint2 stage_scales, next_scales;  // eight units share them with the 32 outputs around

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int lane, uint32_t,
                                        bool = false) {
    codes = args.wkv + tile * kTileOutputs * args.in_features + lane * 16;
    scales = args.wkv + args.out_features * args.in_features + tile / 2 * (args.in_features / 32);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) unit[i] = stream16(codes + i * ArrangedE4M3::kUnitBytes);
    next_scales = stream8(scales);
  }

  __device__ __forceinline__ void begin_stage(int, bool has_next) {
    codes += ArrangedE4M3::kStageBytes;
    scales += kUnits;
    stage_scales = next_scales;
    if (has_next) next_scales = stream8(scales);
  }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], bool has_next) {
    const uint32_t word = kUnit < 4 ? stage_scales.x : stage_scales.y;
    const uint32_t factor = ArrangedE4M3::factor((word >> (8 * (kUnit % 4))) & 0xFFu);
    ArrangedE4M3::decode(unit[kUnit].x, unit[kUnit].y, factor, a[0]);
    ArrangedE4M3::decode(unit[kUnit].z, unit[kUnit].w, factor, a[1]);
    if (has_next) unit[kUnit] = stream16(codes + kUnit * ArrangedE4M3::kUnitBytes);
  }
};

// Six units in flight, and a factor a unit for each of the lane's two outputs.
struct Q80Stream {
  static constexpr int kStageBytes = ArrangedQ80::kStageBytes;
  static constexpr int kAhead = 1, kExchangeBytes = 0, kInFlight = 6;
  const uint8_t* codes;
  int to_factors;
  uint4 unit[kUnits], factors[2];  // four units share 16 bytes of factors, replaced with the last

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int lane, uint32_t,
                                        bool is_alone = false) {
    codes = args.wkv + tile * (args.in_features / kStageValues) * ArrangedQ80::kStageBytes;
    to_factors = ArrangedQ80::kFactorsAt + lane / 4 * 32 - lane * 16;
    codes += lane * 16;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      if (i < kInFlight || is_alone) fetch(i);
    fetch_factors(0);
    fetch_factors(1);
  }

  __device__ __forceinline__ void begin_stage(int, bool) { codes += ArrangedQ80::kStageBytes; }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], bool has_next) {
    const uint32_t pair = word_of<kUnit % 4>(factors[kUnit / 4]);
    const float top = half_to_float(static_cast<uint16_t>(pair));
    const float bottom = half_to_float(static_cast<uint16_t>(pair >> 16));
    ArrangedQ80::decode(unit[kUnit].x, unit[kUnit].y, top, bottom, a[0]);
    ArrangedQ80::decode(unit[kUnit].z, unit[kUnit].w, top, bottom, a[1]);
    // From kUnits on in the next stage.
    constexpr int kNext = kUnit + (kIsAlone ? kUnits : kInFlight);
    if (kNext < kUnits || has_next) fetch(kNext % kUnits, kNext < kUnits);
    if (kUnit % 4 == 3 && has_next) fetch_factors(kUnit / 4);
    // A caller that is alone comes by here once a stage.
    if (kIsAlone && kUnit % 4 == 1 && has_next) fetch_factors(kUnit / 4);
  }

 private:
  __device__ __forceinline__ void fetch(int i, bool is_of_this_stage = false) {
    unit[i] = stream16(codes + i * ArrangedQ80::kUnitBytes -
                       (is_of_this_stage ? ArrangedQ80::kStageBytes : 0));
  }

  __device__ __forceinline__ void fetch_factors(int i) {
    factors[i] = stream16(codes + to_factors + i * 16);
  }
};

// What Q2_K and Q3_K share: kAheadOf stages in registers, each part replaced by the one kAheadOf
// stages later as soon as it is used up. (Handing stages on from one set of registers to another
// makes the compiler wait for loads that it has only just issued.)
template <class Arranged, class Stage, int kAheadOf>
struct StageStream {
  static constexpr int kAhead = kAheadOf, kStageBytes = Arranged::kStageBytes;
  const uint8_t* next;  // the lane's next stage to ask for
  int lane, turn;
  Stage stages[kAhead];

  __device__ __forceinline__ void start_stages(const StoredArgs& args, int64_t tile, int the_lane) {
    const int num_stages = static_cast<int>(args.in_features / kStageValues);
    next = args.wkv + tile * num_stages * Arranged::kStageBytes;
    lane = the_lane;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < num_stages) {
        stages[i].template load<true, true, true>(next, lane);
        next += Arranged::kStageBytes;
      }
  }

  __device__ __forceinline__ Stage& now() { return stages[turn]; }

  // After a unit: its codes are used up at units 3 and 7, what the stage's groups share at unit 7.
  template <int kUnit, bool kIsAlone>
  __device__ __forceinline__ void replace(bool has_next) {
    if (kIsAlone && kUnit % 2 == 1) {
      if (has_next) now().template load<true, true, true>(next, lane);
      next += Arranged::kStageBytes;
    }
    if (!kIsAlone && kUnit == 3 && has_next)
      now().template load<true, false, false>(next, lane);
    if (!kIsAlone && kUnit == 7) {
      if (has_next) now().template load<false, true, true>(next, lane);
      next += Arranged::kStageBytes;
    }
  }
};

struct Q2KStage {
  uint4 codes[2];
  uint2 scales, d;

  template <bool kFirst, bool kSecond, bool kShared>
  __device__ __forceinline__ void load(const uint8_t* from, int lane) {
    if (kFirst) codes[0] = stream16(from + lane * 16);
    if (kSecond) codes[1] = stream16(from + 512 + lane * 16);
    if (kShared) scales = stream8(from + ArrangedQ2K::kScalesAt + lane * 8);
    if (kShared) d = stream8(from + ArrangedQ2K::kFactorsAt + lane / 4 * 8);
  }
};

template <int kAheadOf, template <int> class Exchange>
struct Q2KStream : StageStream<ArrangedQ2K, Q2KStage, kAheadOf> {
  static constexpr int kExchangeBytes = Exchange<4>::kBytes;
  ArrangedQ2K::Factors top, bottom;
  Exchange<4> exchange;

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int lane,
                                        uint32_t shared, bool = false) {
    this->start_stages(args, tile, lane);
    exchange.start(shared, lane);
  }

  __device__ __forceinline__ void begin_stage(int turn, bool) {
    this->turn = turn;
    top = ArrangedQ2K::factors(this->now().d.x);
    bottom = ArrangedQ2K::factors(this->now().d.y);
  }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], bool has_next) {
    constexpr int kQuarter = kUnit / 2;  // of the stage: four groups, one a lane of four
    if (kUnit % 2 == 0) {
      const int shift = kQuarter / 2 * 16;
      const auto y = ArrangedQ2K::values(this->now().scales.x >> shift, kQuarter % 2, top);
      const auto z = ArrangedQ2K::values(this->now().scales.y >> shift, kQuarter % 2, bottom);
      exchange.put(kQuarter % 2, {y.low, y.high, z.low, z.high});
    }
    const uint32_t word = word_of<kUnit % 4>(this->now().codes[kUnit / 4]);
    step<kUnit, 0>(word, a[0]);
    step<kUnit, 1>(word, a[1]);
    this->template replace<kUnit, kIsAlone>(has_next);
  }

 private:
  template <int kUnit, int kStep>
  __device__ __forceinline__ void step(uint32_t word, uint32_t (&a)[4]) {
    uint32_t y[4];
    exchange.template get<0, kUnit % 2 * 2 + kStep>(kUnit / 2 % 2, y);
    ArrangedQ2K::decode(word, kStep, {y[0], y[1]}, {y[2], y[3]}, a);
  }
};

struct Q3KStage {
  uint4 codes[2], high;
  uint32_t six, half, d;

  template <bool kFirst, bool kSecond, bool kShared>
  __device__ __forceinline__ void load(const uint8_t* from, int lane) {
    if (kFirst) codes[0] = stream16(from + lane * 16);
    if (kSecond) codes[1] = stream16(from + 512 + lane * 16);
    if (!kShared) return;
    high = stream16(from + ArrangedQ3K::kHighAt + lane * 16);
    six = stream4(from + ArrangedQ3K::kScalesAt + lane * 4);
    half = stream2(from + ArrangedQ3K::kHalvesAt + lane * 2);
    d = stream4(from + ArrangedQ3K::kFactorsAt + lane / 4 * 4);
  }
};

template <int kAheadOf, template <int> class Exchange>
struct Q3KStream : StageStream<ArrangedQ3K, Q3KStage, kAheadOf> {
  static constexpr int kExchangeBytes = Exchange<8>::kBytes;
  SixBits six;
  Exchange<8> exchange;

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int lane,
                                        uint32_t shared, bool = false) {
    this->start_stages(args, tile, lane);
    exchange.start(shared, lane);
  }

  __device__ __forceinline__ void begin_stage(int turn, bool) {
    this->turn = turn;
    six = SixBits::unpack(this->now().six, this->now().half);
  }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], bool has_next) {
    constexpr int kQuarter = kUnit / 2;
    if (kUnit % 2 == 0) {
      const uint32_t d = this->now().d;
      const auto y = ArrangedQ3K::values(six.top >> (6 * kQuarter), d);
      const auto z = ArrangedQ3K::values(six.bottom >> (6 * kQuarter), d >> 16);
      exchange.put(kQuarter % 2, {y.low[0], y.low[1], y.high[0], y.high[1], z.low[0], z.low[1],
                                  z.high[0], z.high[1]});
    }
    step<kUnit, 0>(a[0]);
    step<kUnit, 1>(a[1]);
    this->template replace<kUnit, kIsAlone>(has_next);
  }

 private:
  template <int kUnit, int kStep>
  __device__ __forceinline__ void step(uint32_t (&a)[4]) {
    uint32_t y[8];
    exchange.template get<0, kUnit % 2 * 2 + kStep>(kUnit / 2 % 2, y);
    const uint32_t selectors =
        ArrangedQ3K::selectors(word_of<kUnit % 4>(this->now().codes[kUnit / 4]), kStep,
                               word_of<kUnit / 2>(this->now().high), kUnit % 2 * 2 + kStep);
    ArrangedQ3K::decode(selectors, {{y[0], y[1]}, {y[2], y[3]}}, {{y[4], y[5]}, {y[6], y[7]}}, a);
  }
};

template <template <int> class Exchange>
struct Q4KStream {
  static constexpr int kStageBytes = ArrangedQ4K::kStageBytes;
  static constexpr int kAhead = 1, kExchangeBytes = Exchange<8>::kBytes;
  const uint8_t* stage;
  int lane;
  uint4 codes[4];  // two units each, replaced as they are used up
  uint32_t six, half;
  uint2 d;
  Exchange<8> exchange;
  int parity = 0;  // of the stage: which half the exchange is in

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int the_lane,
                                        uint32_t shared, bool = false) {
    stage = args.wkv + tile * (args.in_features / kStageValues) * ArrangedQ4K::kStageBytes;
    lane = the_lane;
    exchange.start(shared, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) fetch_codes(i);
    fetch_factors();
  }

  __device__ __forceinline__ void begin_stage(int, bool has_next) {
    parity ^= 1;
    const SixBits bits = SixBits::unpack(six, half);
    uint32_t words[8];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const auto y = ArrangedQ4K::values(bits, part, d.x, d.y);
      words[part * 4] = float_to_bits(y.scale);
      words[part * 4 + 1] = float_to_bits(y.min);
      words[part * 4 + 2] = float_to_bits(y.bottom_scale);
      words[part * 4 + 3] = float_to_bits(y.bottom_min);
    }
    exchange.put(parity, words);
    stage += ArrangedQ4K::kStageBytes;
    if (has_next) fetch_factors();
  }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], bool has_next) {
    uint32_t y[4];
    exchange.template get<kUnit % 2 * 4, kUnit / 2>(parity, y);
    const ArrangedQ4K::Values values = {bits_to_float(y[0]), bits_to_float(y[1]),
                                        bits_to_float(y[2]), bits_to_float(y[3])};
    ArrangedQ4K::decode(word_of<kUnit % 2 * 2>(codes[kUnit / 2]), values, a[0]);
    ArrangedQ4K::decode(word_of<kUnit % 2 * 2 + 1>(codes[kUnit / 2]), values, a[1]);
    if (kUnit % 2 == 1 && has_next) fetch_codes(kUnit / 2);
  }

 private:
  __device__ __forceinline__ void fetch_codes(int i) {
    codes[i] = stream16(stage + i * 512 + lane * 16);
  }

  __device__ __forceinline__ void fetch_factors() {
    six = stream4(stage + ArrangedQ4K::kScalesAt + lane * 4);
    half = stream2(stage + ArrangedQ4K::kHalvesAt + lane * 2);
    d = stream8(stage + ArrangedQ4K::kFactorsAt + lane / 4 * 8);
  }
};

}  // namespace engram

// wkv as stored on Hopper: from device memory to shared memory by bulk copies, some stages ahead,
// and from there to the A registers of a tensor-core step, by format.
//
// Loads into registers have no look-ahead in a loop of wgmma: the compiler sinks them all to its
// end and waits for them at its top. A bulk copy stays where it was asked for.
#pragma once

#include "stored_streams.cuh"
#include "wgmma.cuh"

namespace engram {

__device__ __forceinline__ uint4 shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}

__device__ __forceinline__ uint2 shared8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}

__device__ __forceinline__ uint32_t shared4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ uint32_t shared2(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
  return v;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The stages of a tile in a ring of kSlots of shared memory. One thread asks for them; whoever
// waits for a stage and leaves it counts along.
template <int kStageBytes, int kSlots>
struct TileRing {
  const uint8_t* next;
  int64_t step;  // from a stage to the next
  uint32_t ring, full, parity;
  int slot, left;  // stages not asked for yet

  // full: kSlots barriers, made and known to all. asks: this is the thread.
  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, uint32_t the_ring,
                                        uint32_t the_full, bool asks) {
    const int64_t num_stages = args.in_features / kStageValues;
    next = args.wkv + tile * num_stages * kStageBytes;
    step = kStageBytes;
    ring = the_ring;
    full = the_full;
    slot = 0;
    parity = 0;
    left = static_cast<int>(num_stages);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) ask(i, asks);
  }

  // Returns where the stage lies.
  __device__ __forceinline__ uint32_t wait() const {
    barrier_wait(full + slot * 8, parity);
    return ring + slot * kStageBytes;
  }

  // The stage has been read by all who do.
  __device__ __forceinline__ void leave(bool asks) {
    ask(slot, asks);
    ++slot;
    if (slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void ask(int to, bool asks) {
    copy_bulk_if(asks && left > 0, ring + to * kStageBytes, next, kStageBytes, full + to * 8);
    next += step;
    --left;
  }
};

#endif

// Decoders: begin() turns to a stage in shared memory, load<unit>() fetches the codes of 32 of k,
// decode<unit>() makes registers of them. kAlone: unit and unit + 1 are all that this warp decodes
// of a stage.

struct E4M3Decoder {
  static constexpr int kStageBytes = ArrangedE4M3::kStageBytes, kExchangeBytes = 0;
  const uint8_t* scales;
  uint2 mine, now;  // of stage lane out of 32; of this stage: eight units share them
  uint4 unit[2];
  uint32_t at;
  int lane, stage, num_stages;

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int the_lane,
                                        uint32_t) {
    lane = the_lane;
    stage = 0;
    num_stages = static_cast<int>(args.in_features / kStageValues);
    scales = args.wkv + args.out_features * args.in_features + tile / 2 * (args.in_features / 32);
    fetch_scales();
  }

  __device__ __forceinline__ void begin(uint32_t from) {
    at = from + lane * 16;
    if (stage > 0 && stage % 32 == 0) fetch_scales();
    now.x = __shfl_sync(0xFFFFFFFFu, mine.x, stage % 32);
    now.y = __shfl_sync(0xFFFFFFFFu, mine.y, stage % 32);
    ++stage;
  }

  template <int kUnit, bool kAlone = false>
  __device__ __forceinline__ void load() {
    unit[kUnit % 2] = shared16(at + kUnit * ArrangedE4M3::kUnitBytes);
  }

  template <int kUnit>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4]) {
    const uint32_t word = kUnit < 4 ? now.x : now.y;
    const uint32_t factor = ArrangedE4M3::factor((word >> (8 * (kUnit % 4))) & 0xFFu);
    const uint4& v = unit[kUnit % 2];
    ArrangedE4M3::decode(v.x, v.y, factor, a[0]);
    ArrangedE4M3::decode(v.z, v.w, factor, a[1]);
  }

 private:
  __device__ __forceinline__ void fetch_scales() {
    const int i = stage + lane < num_stages ? stage + lane : num_stages - 1;
    mine = stream8(scales + i * kUnits);
  }
};

struct Q80Decoder {
  static constexpr int kStageBytes = ArrangedQ80::kStageBytes, kExchangeBytes = 0;
  uint4 unit[2], factors[2];
  uint32_t at;
  int lane;

  __device__ __forceinline__ void start(const StoredArgs&, int64_t, int the_lane, uint32_t) {
    lane = the_lane;
  }

  __device__ __forceinline__ void begin(uint32_t from) {
    at = from + lane * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      factors[i] = shared16(from + ArrangedQ80::kFactorsAt + lane / 4 * 32 + i * 16);
  }

  template <int kUnit, bool kAlone = false>
  __device__ __forceinline__ void load() {
    unit[kUnit % 2] = shared16(at + kUnit * ArrangedQ80::kUnitBytes);
  }

  template <int kUnit>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4]) {
    const uint32_t pair = word_of<kUnit % 4>(factors[kUnit / 4]);
    const float top = half_to_float(static_cast<uint16_t>(pair));
    const float bottom = half_to_float(static_cast<uint16_t>(pair >> 16));
    const uint4& v = unit[kUnit % 2];
    ArrangedQ80::decode(v.x, v.y, top, bottom, a[0]);
    ArrangedQ80::decode(v.z, v.w, top, bottom, a[1]);
  }
};

// What a quant group needs is computed by one lane of four and handed to the other three.
struct Q2KDecoder {
  static constexpr int kStageBytes = ArrangedQ2K::kStageBytes;
  static constexpr int kExchangeBytes = BySharedMemory<4>::kBytes;
  BySharedMemory<4> exchange;
  ArrangedQ2K::Factors top, bottom;
  uint4 codes[2];
  uint2 scales;
  uint32_t at;
  int lane;

  __device__ __forceinline__ void start(const StoredArgs&, int64_t, int the_lane,
                                        uint32_t shared) {
    lane = the_lane;
    exchange.start(shared, lane);
  }

  __device__ __forceinline__ void begin(uint32_t from) {
    at = from + lane * 16;
    const uint2 d = shared8(from + ArrangedQ2K::kFactorsAt + lane / 4 * 8);
    scales = shared8(from + ArrangedQ2K::kScalesAt + lane * 8);
    top = ArrangedQ2K::factors(d.x);
    bottom = ArrangedQ2K::factors(d.y);
  }

  template <int kUnit, bool kAlone = false>
  __device__ __forceinline__ void load() {
    if (kUnit % 4 == 0 || (kAlone && kUnit % 2 == 0))
      codes[kUnit / 4] = shared16(at + kUnit / 4 * 512);
  }

  template <int kUnit>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4]) {
    constexpr int kQuarter = kUnit / 2;  // of the stage: four groups, one a lane of four
    if (kUnit % 2 == 0) {
      const int shift = kQuarter / 2 * 16;
      const auto y = ArrangedQ2K::values(scales.x >> shift, kQuarter % 2, top);
      const auto z = ArrangedQ2K::values(scales.y >> shift, kQuarter % 2, bottom);
      exchange.put(kQuarter % 2, {y.low, y.high, z.low, z.high});
    }
    const uint32_t word = word_of<kUnit % 4>(codes[kUnit / 4]);
    step<kUnit, 0>(word, a[0]);
    step<kUnit, 1>(word, a[1]);
  }

 private:
  template <int kUnit, int kStep>
  __device__ __forceinline__ void step(uint32_t word, uint32_t (&a)[4]) {
    uint32_t y[4];
    exchange.template get<0, kUnit % 2 * 2 + kStep>(kUnit / 2 % 2, y);
    ArrangedQ2K::decode(word, kStep, {y[0], y[1]}, {y[2], y[3]}, a);
  }
};

struct Q3KDecoder {
  static constexpr int kStageBytes = ArrangedQ3K::kStageBytes;
  static constexpr int kExchangeBytes = BySharedMemory<8>::kBytes;
  BySharedMemory<8> exchange;
  SixBits six;
  uint4 codes[2], high;
  uint32_t at, d;
  int lane;

  __device__ __forceinline__ void start(const StoredArgs&, int64_t, int the_lane,
                                        uint32_t shared) {
    lane = the_lane;
    exchange.start(shared, lane);
  }

  __device__ __forceinline__ void begin(uint32_t from) {
    at = from + lane * 16;
    high = shared16(at + ArrangedQ3K::kHighAt);
    d = shared4(from + ArrangedQ3K::kFactorsAt + lane / 4 * 4);
    six = SixBits::unpack(shared4(from + ArrangedQ3K::kScalesAt + lane * 4),
                          shared2(from + ArrangedQ3K::kHalvesAt + lane * 2));
  }

  template <int kUnit, bool kAlone = false>
  __device__ __forceinline__ void load() {
    if (kUnit % 4 == 0 || (kAlone && kUnit % 2 == 0))
      codes[kUnit / 4] = shared16(at + kUnit / 4 * 512);
  }

  template <int kUnit>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4]) {
    constexpr int kQuarter = kUnit / 2;
    if (kUnit % 2 == 0) {
      const auto y = ArrangedQ3K::values(six.top >> (6 * kQuarter), d);
      const auto z = ArrangedQ3K::values(six.bottom >> (6 * kQuarter), d >> 16);
      exchange.put(kQuarter % 2, {y.low[0], y.low[1], y.high[0], y.high[1], z.low[0], z.low[1],
                                  z.high[0], z.high[1]});
    }
    step<kUnit, 0>(a[0]);
    step<kUnit, 1>(a[1]);
  }

 private:
  template <int kUnit, int kStep>
  __device__ __forceinline__ void step(uint32_t (&a)[4]) {
    uint32_t y[8];
    exchange.template get<0, kUnit % 2 * 2 + kStep>(kUnit / 2 % 2, y);
    const uint32_t selectors =
        ArrangedQ3K::selectors(word_of<kUnit % 4>(codes[kUnit / 4]), kStep,
                               word_of<kUnit / 2>(high), kUnit % 2 * 2 + kStep);
    ArrangedQ3K::decode(selectors, {{y[0], y[1]}, {y[2], y[3]}}, {{y[4], y[5]}, {y[6], y[7]}}, a);
  }
};

struct Q4KDecoder {
  static constexpr int kStageBytes = ArrangedQ4K::kStageBytes;
  static constexpr int kExchangeBytes = BySharedMemory<8>::kBytes;
  BySharedMemory<8> exchange;
  uint4 codes[2];  // two units each
  uint32_t at;
  int lane, parity;  // of the stage: which half the exchange is in

  __device__ __forceinline__ void start(const StoredArgs&, int64_t, int the_lane,
                                        uint32_t shared) {
    lane = the_lane;
    parity = 0;
    exchange.start(shared, lane);
  }

  __device__ __forceinline__ void begin(uint32_t from) {
    at = from + lane * 16;
    parity ^= 1;
    const uint2 d = shared8(from + ArrangedQ4K::kFactorsAt + lane / 4 * 8);
    const SixBits bits = SixBits::unpack(shared4(from + ArrangedQ4K::kScalesAt + lane * 4),
                                         shared2(from + ArrangedQ4K::kHalvesAt + lane * 2));
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
  }

  template <int kUnit, bool kAlone = false>
  __device__ __forceinline__ void load() {
    if (kUnit % 2 == 0) codes[kUnit / 2 % 2] = shared16(at + kUnit / 2 * 512);
  }

  template <int kUnit>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4]) {
    uint32_t y[4];
    exchange.template get<kUnit % 2 * 4, kUnit / 2>(parity, y);
    const ArrangedQ4K::Values values = {bits_to_float(y[0]), bits_to_float(y[1]),
                                        bits_to_float(y[2]), bits_to_float(y[3])};
    const uint4& v = codes[kUnit / 2 % 2];
    ArrangedQ4K::decode(word_of<kUnit % 2 * 2>(v), values, a[0]);
    ArrangedQ4K::decode(word_of<kUnit % 2 * 2 + 1>(v), values, a[1]);
  }
};

}  // namespace engram

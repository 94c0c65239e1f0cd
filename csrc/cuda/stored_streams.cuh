// wkv as stored, from device memory straight into registers, a stage or more ahead.
#pragma once

#include <cuda_runtime.h>

#include "../formats/stored_decoders.h"
#include "exchange.cuh"
#include "project_stored.cuh"
#include "stored_bytes.cuh"

namespace engram {

// A lane's view of one tile of 16 outputs: start() asks for the first weights, begin_stage() turns
// to the next stage, decode<unit>() makes the registers of 32 of k. kAhead stages are in registers
// (of the codes kUnitsInFlight units, where that is less than a stage), each part replaced by the
// one that much later as soon as it is used up: handing stages on from one set of registers to
// another makes the compiler wait for loads that it has only just issued.
//
// kTurnsLate: addresses move on behind a stage instead of in front of it. It decides where ptxas
// puts the loads, and so does more than an addition should: up to 1.5 us, this way or that way, by
// format (docs/notes/stored_wkv.md).
//
// A caller that is alone with two units of each stage (2 n and 2 n + 1) and leaves the others to
// other warps says so to start() and to decode() (kIsAlone).
template <class Decoder, int kAheadOf = 1, int kUnitsInFlight = kUnits, bool kTurnsLate = false>
struct RegisterStream {
  static constexpr int kAhead = kAheadOf, kExchangeBytes = Decoder::kExchangeBytes;

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int the_lane,
                                        uint32_t exchange, bool is_alone = false) {
    const int64_t num_stages = args.in_features / kStageValues;
    stored = &args;
    lane = the_lane;
    next = {args.wkv + stage_at<Arranged>(tile, 0, args.out_features / kTileOutputs, num_stages) +
            lane * 16};
    if constexpr (kAreScalesApart<Decoder>) next_scales = {scales_of(args, tile)};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < num_stages) {
        if (i > 0) advance();
#pragma unroll
        for (int load = 0; load < kLoads; ++load)
          if (load < kLoadsInFlight || is_alone) load_codes(stages[i], load, next);
        load_rest<0>(stages[i]);
        if constexpr (Decoder::kRestParts == 2) load_rest<1>(stages[i]);
      }
    if (kTurnsLate) advance();
    decoder.start(exchange, lane);
  }

  // has_next: there is a stage kAhead later.
  __device__ __forceinline__ void begin_stage(int the_turn, bool has_next) {
    turn = the_turn;
    decoder.begin(stages[turn].rest);
    if (!kTurnsLate) advance();
    if (Decoder::kRestEndsAtBegin && has_next) load_rest<0>(stages[turn]);
  }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], bool has_next) {
    constexpr int kLoad = kUnit / Decoder::kCodeUnits, kRestUnits = kUnits / Decoder::kRestParts;
    Stage& now = stages[turn];
    decoder.template decode<kUnit>(now.codes[kLoad], now.rest, a);
    if constexpr (ends<kIsAlone>(kUnit, Decoder::kCodeUnits)) {
      constexpr int kLater = kLoad + (kIsAlone ? kLoads : kLoadsInFlight);
      if constexpr (kLater < kLoads)
        load_codes(now, kLater, next + -step());
      else if (has_next)
        load_codes(now, kLater - kLoads, next);
    }
    if constexpr (!Decoder::kRestEndsAtBegin && ends<kIsAlone>(kUnit, kRestUnits))
      if (has_next) load_rest<kUnit / kRestUnits>(now);
    if constexpr (kTurnsLate && ends<kIsAlone>(kUnit, kUnits)) advance();
  }

 private:
  using Arranged = typename Decoder::Arranged;
  static constexpr int kLoads = kUnits / Decoder::kCodeUnits;  // of codes, a stage
  static constexpr int kLoadsInFlight = kUnitsInFlight / Decoder::kCodeUnits;
  static_assert(kAhead == 1 || kLoadsInFlight == kLoads, "several stages are whole");

  struct Stage {
    uint4 codes[kLoads];
    typename Decoder::Rest rest;
  };

  // Whether a unit is the last of its run of so many, for a caller that has all or only two.
  template <bool kIsAlone>
  __device__ static constexpr bool ends(int unit, int run) {
    const int mine = kIsAlone && run > 2 ? 2 : run;
    return unit % mine == mine - 1;
  }

  // From a stage to the next. Worked out from the parameters each time: no register is left for it.
  __device__ __forceinline__ int step() const {
    return static_cast<int>(stage_at<Arranged>(0, 1, stored->out_features / kTileOutputs, 0));
  }

  __device__ __forceinline__ void advance() {
    next = next + step();
    next_scales = next_scales + kUnits;
  }

  __device__ __forceinline__ void load_codes(Stage& stage, int load, DeviceBytes from) {
    stage.codes[load] = from.load16(load * 512);
  }

  template <int kPart>
  __device__ __forceinline__ void load_rest(Stage& stage) {
    if constexpr (kAreScalesApart<Decoder>)
      stage.rest.scales = next_scales.load8(0);
    else
      Decoder::template load_rest<kPart>(stage.rest, next + -lane * 16, lane);
  }

  const StoredArgs* stored;
  DeviceBytes next, next_scales;  // of the stage to ask for: the lane's codes; scales, where apart
  int lane, turn;
  Stage stages[kAhead];
  Decoder decoder;
};

}  // namespace engram

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
// A caller that is alone with two units of each stage (2 n and 2 n + 1) and leaves the others to
// other warps says so to start() and to decode() (kIsAlone).
template <class Decoder, int kAheadOf = 1, int kUnitsInFlight = kUnits>
struct RegisterStream {
  static constexpr int kAhead = kAheadOf, kExchangeBytes = Decoder::kExchangeBytes;

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int the_lane,
                                        uint32_t exchange, bool is_alone = false) {
    const int num_stages = static_cast<int>(args.in_features / kStageValues);
    lane = the_lane;
    codes = {args.wkv + tile * num_stages * kStageBytes + lane * 16};
    if constexpr (kAreScalesApart<Decoder>) scales = {scales_of(args, tile)};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < num_stages) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load)
          if (load < kLoadsInFlight || is_alone) load_codes(stages[i], load, i);
        load_rest<0>(stages[i], i);
        if constexpr (Decoder::kRestParts == 2) load_rest<1>(stages[i], i);
      }
    decoder.start(exchange, lane);
  }

  // has_next: there is a stage kAhead later.
  __device__ __forceinline__ void begin_stage(int the_turn, bool has_next) {
    turn = the_turn;
    decoder.begin(stages[turn].rest);
    if (Decoder::kRestEndsAtBegin && has_next) load_rest<0>(stages[turn], kAhead);
  }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], bool has_next) {
    constexpr int kLoad = kUnit / Decoder::kCodeUnits, kRestUnits = kUnits / Decoder::kRestParts;
    Stage& now = stages[turn];
    decoder.template decode<kUnit>(now.codes[kLoad], now.rest, a);
    if constexpr (ends<kIsAlone>(kUnit, Decoder::kCodeUnits)) {
      constexpr int kLater = kLoad + (kIsAlone ? kLoads : kLoadsInFlight);
      if (kLater < kLoads || has_next) load_codes(now, kLater % kLoads, kLater / kLoads * kAhead);
    }
    if constexpr (!Decoder::kRestEndsAtBegin && ends<kIsAlone>(kUnit, kRestUnits))
      if (has_next) load_rest<kUnit / kRestUnits>(now, kAhead);
    if constexpr (ends<kIsAlone>(kUnit, kUnits)) {
      codes = codes + kStageBytes;
      scales = scales + kUnits;
    }
  }

 private:
  static constexpr int kStageBytes = Decoder::Arranged::kStageBytes;
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

  // What replaces parts of `stage`, of the stage `later` than this one.
  __device__ __forceinline__ void load_codes(Stage& stage, int load, int later) {
    stage.codes[load] = codes.load16(later * kStageBytes + load * 512);
  }

  template <int kPart>
  __device__ __forceinline__ void load_rest(Stage& stage, int later) {
    if constexpr (kAreScalesApart<Decoder>)
      stage.rest.scales = scales.load8(later * kUnits);
    else
      Decoder::template load_rest<kPart>(stage.rest, codes + (later * kStageBytes - lane * 16),
                                         lane);
  }

  DeviceBytes codes, scales;  // of this stage: the lane's; the tile's, where they lie apart
  int lane, turn;
  Stage stages[kAhead];
  Decoder decoder;
};

}  // namespace engram

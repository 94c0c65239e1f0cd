// wkv as stored on Hopper: from device memory to shared memory by bulk copies, some stages ahead,
// and from there into registers.
//
// Loads into registers have no look-ahead in a loop of wgmma: the compiler sinks them all to its
// end and waits for them at its top. A bulk copy stays where it was asked for.
#pragma once

#include <cuda_runtime.h>

#include "../formats/stored_decoders.h"
#include "barriers.cuh"
#include "exchange.cuh"
#include "project_stored.cuh"
#include "stored_bytes.cuh"

namespace engram {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The stages of a tile in a ring of kSlots of shared memory. One thread asks for them; whoever
// waits for a stage and leaves it counts along.
template <class Arranged, int kSlots>
struct TileRing {
  const uint8_t* next;
  int64_t step;  // from a stage to the next
  uint32_t ring, full, parity;
  int slot, left;  // stages not asked for yet

  // full: kSlots barriers, made and known to all. asks: this is the thread.
  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, uint32_t the_ring,
                                        uint32_t the_full, bool asks) {
    const int64_t num_stages = args.in_features / kStageValues;
    const int64_t num_tiles = args.out_features / kTileOutputs;
    next = args.wkv + stage_at<Arranged>(tile, 0, num_tiles, num_stages);
    step = stage_at<Arranged>(0, 1, num_tiles, num_stages);
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
  static constexpr int kStageBytes = Arranged::kStageBytes;

  __device__ __forceinline__ void ask(int to, bool asks) {
    copy_bulk_if(asks && left > 0, ring + to * kStageBytes, next, kStageBytes, full + to * 8);
    next += step;
    --left;
  }
};

#endif

// The scales of a tile's stages one after the other, where they lie apart from the codes: 32 stages
// by one load, a lane's of one stage.
template <class Decoder, bool kAreApart = kAreScalesApart<Decoder>>
struct ScaleStream {
  __device__ __forceinline__ void start(const StoredArgs&, int64_t, int) {}
};

template <class Decoder>
struct ScaleStream<Decoder, true> {
  DeviceBytes scales;
  uint2 mine;
  int lane, stage, num_stages;

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int the_lane) {
    scales = {scales_of(args, tile)};
    lane = the_lane;
    stage = 0;
    num_stages = static_cast<int>(args.in_features / kStageValues);
    load();
  }

  __device__ __forceinline__ uint2 next() {
    if (stage > 0 && stage % 32 == 0) load();
    const uint2 now = {__shfl_sync(0xFFFFFFFFu, mine.x, stage % 32),
                       __shfl_sync(0xFFFFFFFFu, mine.y, stage % 32)};
    ++stage;
    return now;
  }

 private:
  __device__ __forceinline__ void load() {
    mine = scales.load8(min(stage + lane, num_stages - 1) * kUnits);
  }
};

// A lane's view of one tile: begin() turns to a stage in shared memory, load<unit>() fetches the
// codes of 32 of k, decode<unit>() makes registers of them. kIsAlone: unit and unit + 1 are all
// that this warp decodes of a stage.
template <class DecoderOf>
struct SharedStream {
  using Decoder = DecoderOf;
  static constexpr int kStageBytes = Decoder::Arranged::kStageBytes;
  static constexpr int kExchangeBytes = Decoder::kExchangeBytes;

  __device__ __forceinline__ void start(const StoredArgs& args, int64_t tile, int the_lane,
                                        uint32_t exchange) {
    lane = the_lane;
    scales.start(args, tile, lane);
    decoder.start(exchange, lane);
  }

  __device__ __forceinline__ void begin(uint32_t from) {
    stage = {from};
    if constexpr (kAreScalesApart<Decoder>) {
      rest.scales = scales.next();
    } else {
      Decoder::template load_rest<0>(rest, stage, lane);
      if constexpr (Decoder::kRestParts == 2) Decoder::template load_rest<1>(rest, stage, lane);
    }
    decoder.begin(rest);
  }

  template <int kUnit, bool kIsAlone = false>
  __device__ __forceinline__ void load() {
    if constexpr (kUnit % Decoder::kCodeUnits == 0 || (kIsAlone && kUnit % 2 == 0))
      codes[kUnit / Decoder::kCodeUnits] =
          stage.load16(kUnit / Decoder::kCodeUnits * 512 + lane * 16);
  }

  template <int kUnit>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4]) {
    decoder.template decode<kUnit>(codes[kUnit / Decoder::kCodeUnits], rest, a);
  }

 private:
  SharedBytes stage;
  int lane;
  uint4 codes[kUnits / Decoder::kCodeUnits];
  typename Decoder::Rest rest;
  ScaleStream<Decoder> scales;
  Decoder decoder;
};

}  // namespace engram

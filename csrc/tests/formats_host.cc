// Host build of the row formats and the hash, for tests/native: the same headers, the same bits.
// g++ -std=c++17 -O2 -ffp-contract=off -shared -fPIC
#include "../formats/arranged_blocks.h"
#include "../formats/formats.h"
#include "../formats/requantize.h"
#include "../formats/stored_decoders.h"
#include "../hash.h"

using namespace engram;

struct HostBytes {
  const uint8_t* at;

  template <class T>
  T load(int offset) const {
    T value;
    memcpy(&value, at + offset, sizeof value);
    return value;
  }
  uint4 load16(int offset) const { return load<uint4>(offset); }
  uint2 load8(int offset) const { return load<uint2>(offset); }
  uint32_t load4(int offset) const { return load<uint32_t>(offset); }
  uint32_t load2(int offset) const { return load<uint16_t>(offset); }
};

// cuda/exchange.cuh for lanes that run one after the other.
template <int kWords>
struct HostExchange {
  static constexpr int kBytes = 0;
  static inline uint32_t put_by[2][32][kWords];  // in each half, by each lane
  int lane;

  void start(uint32_t, int the_lane) { lane = the_lane; }

  void put(int turn, const uint32_t (&words)[kWords]) {
    memcpy(put_by[turn][lane], words, sizeof words);
  }

  template <int kFirst, int kOwner, int kCount>
  void get(int turn, uint32_t (&words)[kCount]) const {
    memcpy(words, put_by[turn][lane / 4 * 4 + kOwner] + kFirst, sizeof words);
  }
};

// The A registers of one unit of all lanes.
using Fragments = uint32_t[32][2][4];

template <int kUnit, class Decoder>
static void decode_unit(Decoder (&lanes)[32], const typename Decoder::Rest (&rest)[32],
                        HostBytes stage, Fragments& a) {
  for (int pass = 0; pass < 2; ++pass)  // the second finds what every lane has put in the first
    for (int lane = 0; lane < 32; ++lane) {
      const uint4 codes = stage.load16(kUnit / Decoder::kCodeUnits * 512 + lane * 16);
      lanes[lane].template decode<kUnit>(codes, rest[lane], a[lane]);
    }
}

template <class Decoder>
static void load_rest(Decoder, typename Decoder::Rest& rest, HostBytes stage, HostBytes, int lane) {
  Decoder::template load_rest<0>(rest, stage, lane);
  if constexpr (Decoder::kRestParts == 2) Decoder::template load_rest<1>(rest, stage, lane);
}

static void load_rest(E4M3Decoder, E4M3Decoder::Rest& rest, HostBytes, HostBytes scales, int) {
  rest.scales = scales.load8(0);
}

// A stage as the kernels decode it. scales: of E4M3, behind all codes
template <class Decoder>
static void decode_stage(Decoder, const uint8_t* stage, const uint8_t* scales,
                         Fragments (&a)[kUnits]) {
  Decoder lanes[32];
  typename Decoder::Rest rest[32];
  for (int lane = 0; lane < 32; ++lane) {
    load_rest(Decoder{}, rest[lane], {stage}, {scales}, lane);
    lanes[lane].start(0, lane);
    lanes[lane].begin(rest[lane]);
  }
  decode_unit<0>(lanes, rest, {stage}, a[0]);
  decode_unit<1>(lanes, rest, {stage}, a[1]);
  decode_unit<2>(lanes, rest, {stage}, a[2]);
  decode_unit<3>(lanes, rest, {stage}, a[3]);
  decode_unit<4>(lanes, rest, {stage}, a[4]);
  decode_unit<5>(lanes, rest, {stage}, a[5]);
  decode_unit<6>(lanes, rest, {stage}, a[6]);
  decode_unit<7>(lanes, rest, {stage}, a[7]);
}

template <class Visitor>
static void visit_decoder(int32_t format, Visitor&& visitor) {
  switch (format) {
    case ENGRAM_Q8_0:
      return visitor(Q80Decoder{});
    case ENGRAM_Q2_K:
      return visitor(Q2KDecoder<HostExchange>{});
    case ENGRAM_Q3_K:
      return visitor(Q3KDecoder<HostExchange>{});
    case ENGRAM_Q4_K:
      return visitor(Q4KDecoder<HostExchange>{});
    default:
      return visitor(E4M3Decoder{});
  }
}

extern "C" {

int64_t host_row_bytes(int32_t format, int64_t row_values) { return row_bytes(format, row_values); }

// codes [num_rows, stride]; scales [num_rows, scale_stride] -> f32 [num_rows, row_values]
int32_t host_dequantize(int32_t format, int64_t num_rows, int64_t row_values, const uint8_t* codes,
                        int64_t code_stride, const uint8_t* scales, int64_t scale_stride,
                        float* out) {
  const bool found = visit_format(format, [&](auto tag) {
    using Format = typename decltype(tag)::type;
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t group = 0; group < row_values / 8; ++group) {
        const auto raw = load_row_group<Format>(
            codes + row * code_stride, scales + row * scale_stride, static_cast<int>(group));
        float y[8];
        decode_row_group<Format>(raw, static_cast<int>(group), y);
        memcpy(out + row * row_values + group * 8, y, sizeof y);
      }
  });
  return found ? 0 : 1;
}

int64_t host_arranged_bytes(int32_t format, int64_t outputs, int64_t inputs) {
  return arranged_bytes(format, outputs, inputs);
}

// codes [outputs, row_bytes] (scales [outputs / 32, inputs / 32]) -> the bytes arranged
void host_arrange(int32_t format, int64_t outputs, int64_t inputs, const uint8_t* codes,
                  const uint8_t* scales, uint8_t* to) {
  const int64_t tiles = outputs / kTileOutputs, stages = inputs / kStageValues;
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t stage = 0; stage < stages; ++stage)
      for (int lane = 0; lane < 32; ++lane) {
        const bool is_blocks = visit_arranged_blocks(format, [&](auto tag) {
          using Arranged = decltype(tag);
          constexpr int kStored = Arranged::kStageBytes / kTileOutputs;  // an output's, of a stage
          const int64_t stride = stages * kStored;
          Arranged::arrange(codes + tile * kTileOutputs * stride + stage * kStored, stride, lane,
                            to + stage_at<Arranged>(tile, stage, tiles, stages));
        });
        if (is_blocks) continue;
        for (int unit = 0; unit < kUnits; ++unit) {
          const uint8_t* rows =
              codes + tile * kTileOutputs * inputs + stage * kStageValues + unit * kUnitValues;
          const ArrangedE4M3::Unit made = ArrangedE4M3::arrange(rows, inputs, lane);
          memcpy(to + stage_at<ArrangedE4M3>(tile, stage, tiles, stages) +
                     unit * ArrangedE4M3::kUnitBytes + lane * 16,
                 made.word, 16);
        }
      }
  if (format == ENGRAM_E4M3_E8M0_32) memcpy(to + outputs * inputs, scales, outputs * inputs / 1024);
}

// arranged -> bf16 [outputs, inputs], each register's halves put where the tensor core takes them
void host_decode_arranged(int32_t format, int64_t outputs, int64_t inputs, const uint8_t* arranged,
                          uint16_t* out) {
  const int64_t tiles = outputs / kTileOutputs, stages = inputs / kStageValues;
  visit_decoder(format, [&](auto decoder) {
    using Arranged = typename decltype(decoder)::Arranged;
    for (int64_t tile = 0; tile < tiles; ++tile)
      for (int64_t stage = 0; stage < stages; ++stage) {
        Fragments a[kUnits];
        const uint8_t* scales = nullptr;
        if (format == ENGRAM_E4M3_E8M0_32)
          scales = arranged + outputs * inputs + (tile / 2 * stages + stage) * kUnits;
        decode_stage(decoder, arranged + stage_at<Arranged>(tile, stage, tiles, stages), scales, a);
        for (int unit = 0; unit < kUnits; ++unit)
          for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 16; ++i) {  // PTX ISA, fragments of m16n8k16
              const int step = i / 8, r = i / 2 % 4, half = i % 2;
              const int64_t row = tile * kTileOutputs + lane / 4 + r % 2 * 8;
              const int64_t k = stage * kStageValues + unit * kUnitValues + step * 16 + r / 2 * 8 +
                                lane % 4 * 2 + half;
              out[row * inputs + k] = static_cast<uint16_t>(a[unit][lane][step][r] >> (16 * half));
            }
      }
  });
}

void host_to_bf16(int64_t count, const float* values, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = float_to_bf16(values[i]);
}

// x [count] in groups of 32 -> f32 [count]
void host_requantize(int64_t count, const float* x, float* out) {
  for (int64_t begin = 0; begin < count; begin += 32) {
    float amax = 0.0f;
    bool has_nan = false;
    for (int i = 0; i < 32; ++i) {
      const float magnitude = bits_to_float(float_to_bits(x[begin + i]) & 0x7FFFFFFFu);
      has_nan |= magnitude != magnitude;
      if (magnitude > amax) amax = magnitude;
    }
    const float scale = requantize_scale(has_nan ? bits_to_float(0x7FC00000u) : amax);
    for (int i = 0; i < 32; ++i) out[begin + i] = requantize(x[begin + i], scale);
  }
}

int64_t host_floor_mod(int64_t value, int64_t prime) {
  return floor_mod(value, prime, reciprocal(prime));
}

// windows [num_tokens, max_ngram_size] -> ids [num_tokens, cols]
void host_hash(const engram_hash* hash, int64_t num_tokens, const int32_t* windows, int64_t* ids) {
  engram_hash prepared = *hash;
  const int cols = (hash->max_ngram_size - 1) * hash->num_heads;
  for (int c = 0; c < cols; ++c) prepared.reciprocals[c] = reciprocal(prepared.primes[c]);
  for (int64_t t = 0; t < num_tokens; ++t)
    for (int c = 0; c < cols; ++c)
      ids[t * cols + c] =
          hash_row_id(prepared, [&](int i) { return windows[t * hash->max_ngram_size + i]; }, c);
}

}  // extern "C"

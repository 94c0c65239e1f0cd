// Host build of the row formats and the hash, for tests/native: the same headers, the same bits.
// g++ -std=c++17 -O2 -ffp-contract=off -shared -fPIC
#include "../formats/arranged_blocks.h"
#include "../formats/formats.h"
#include "../formats/requantize.h"
#include "../hash.h"

using namespace engram;

// The A registers of one unit of every lane, as the kernels make them.
static void decode_e4m3(int64_t outputs, int64_t inputs, const uint8_t* arranged, int64_t tile,
                        int64_t unit, int lane, uint32_t (&a)[2][4]) {
  const int64_t units = inputs / kUnitValues;
  uint32_t word[4];
  memcpy(word, arranged + (tile * units + unit) * ArrangedE4M3::kUnitBytes + lane * 16, 16);
  const uint32_t factor =
      ArrangedE4M3::factor(arranged[outputs * inputs + tile / 2 * units + unit]);
  ArrangedE4M3::decode(word[0], word[1], factor, a[0]);
  ArrangedE4M3::decode(word[2], word[3], factor, a[1]);
}

template <class T>
static T at(const uint8_t* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

static void decode_unit(ArrangedQ80, const uint8_t* stage, int unit, int lane,
                        uint32_t (&a)[2][4]) {
  using Q = ArrangedQ80;
  const uint8_t* codes = stage + unit * Q::kUnitBytes + lane * 16;
  const uint8_t* d = stage + Q::kFactorsAt + lane / 4 * 32 + unit * 4;
  const float top = half_to_float(at<uint16_t>(d)), bottom = half_to_float(at<uint16_t>(d + 2));
  for (int step = 0; step < 2; ++step)
    Q::decode(at<uint32_t>(codes + step * 8), at<uint32_t>(codes + step * 8 + 4), top, bottom,
              a[step]);
}

static void decode_unit(ArrangedQ2K, const uint8_t* stage, int unit, int lane,
                        uint32_t (&a)[2][4]) {
  using Q = ArrangedQ2K;
  const int quarter = unit / 2;
  const uint32_t word = at<uint32_t>(stage + unit / 4 * 512 + lane * 16 + unit % 4 * 4);
  for (int step = 0; step < 2; ++step) {
    const int owner = lane / 4 * 4 + unit % 2 * 2 + step;
    Q::Values y[2];
    for (int i = 0; i < 2; ++i) {
      const uint32_t scales = at<uint32_t>(stage + Q::kScalesAt + owner * 8 + i * 4);
      const uint32_t d = at<uint32_t>(stage + Q::kFactorsAt + owner / 4 * 8 + i * 4);
      y[i] = Q::values(scales >> (quarter / 2 * 16), quarter % 2, Q::factors(d));
    }
    Q::decode(word, step, y[0], y[1], a[step]);
  }
}

template <class Q>
static SixBits six_of(const uint8_t* stage, int lane) {
  return SixBits::unpack(at<uint32_t>(stage + Q::kScalesAt + lane * 4),
                         at<uint16_t>(stage + Q::kHalvesAt + lane * 2));
}

static void decode_unit(ArrangedQ4K, const uint8_t* stage, int unit, int lane,
                        uint32_t (&a)[2][4]) {
  using Q = ArrangedQ4K;
  const uint8_t* d = stage + Q::kFactorsAt + lane / 4 * 8;
  const Q::Values y = Q::values(six_of<Q>(stage, lane / 4 * 4 + unit / 2), unit % 2,
                                at<uint32_t>(d), at<uint32_t>(d + 4));
  for (int step = 0; step < 2; ++step)
    Q::decode(at<uint32_t>(stage + unit / 2 * 512 + lane * 16 + unit % 2 * 8 + step * 4), y,
              a[step]);
}

static void decode_unit(ArrangedQ3K, const uint8_t* stage, int unit, int lane,
                        uint32_t (&a)[2][4]) {
  using Q = ArrangedQ3K;
  const uint32_t d = at<uint32_t>(stage + Q::kFactorsAt + lane / 4 * 4);
  const uint32_t low = at<uint32_t>(stage + unit / 4 * 512 + lane * 16 + unit % 4 * 4);
  const uint32_t high = at<uint32_t>(stage + Q::kHighAt + lane * 16 + unit / 2 * 4);
  for (int step = 0; step < 2; ++step) {
    const SixBits six = six_of<Q>(stage, lane / 4 * 4 + unit % 2 * 2 + step);
    const int at_bit = 6 * (unit / 2);
    Q::decode(Q::selectors(low, step, high, unit % 2 * 2 + step), Q::values(six.top >> at_bit, d),
              Q::values(six.bottom >> at_bit, d >> 16), a[step]);
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
  const int64_t stages = inputs / kStageValues;
  for (int64_t tile = 0; tile < outputs / kTileOutputs; ++tile)
    for (int64_t stage = 0; stage < stages; ++stage)
      for (int lane = 0; lane < 32; ++lane) {
        const bool is_blocks = visit_arranged_blocks(format, [&](auto tag) {
          using Arranged = decltype(tag);
          constexpr int kStored = Arranged::kStageBytes / kTileOutputs;  // an output's, of a stage
          const int64_t stride = stages * kStored;
          Arranged::arrange(codes + tile * kTileOutputs * stride + stage * kStored, stride, lane,
                            to + (tile * stages + stage) * Arranged::kStageBytes);
        });
        if (is_blocks) continue;
        for (int unit = 0; unit < kUnits; ++unit) {
          const uint8_t* rows =
              codes + tile * kTileOutputs * inputs + stage * kStageValues + unit * kUnitValues;
          uint32_t words[4] = {};
          for (int byte = 0; byte < 16; ++byte) {
            const FragmentPlace place = ArrangedE4M3::place_of_byte(lane, byte);
            words[byte / 4] |=
                ArrangedE4M3::in_word(rows[place.output * inputs + place.k], byte % 4);
          }
          memcpy(
              to + ((tile * stages + stage) * kUnits + unit) * ArrangedE4M3::kUnitBytes + lane * 16,
              words, 16);
        }
      }
  if (format == ENGRAM_E4M3_E8M0_32) memcpy(to + outputs * inputs, scales, outputs * inputs / 1024);
}

// arranged -> bf16 [outputs, inputs], each register's halves put where the tensor core takes them
void host_decode_arranged(int32_t format, int64_t outputs, int64_t inputs, const uint8_t* arranged,
                          uint16_t* out) {
  for (int64_t tile = 0; tile < outputs / kTileOutputs; ++tile)
    for (int64_t unit = 0; unit < inputs / kUnitValues; ++unit)
      for (int lane = 0; lane < 32; ++lane) {
        uint32_t a[2][4];
        const bool is_blocks = visit_arranged_blocks(format, [&](auto tag) {
          const int64_t stage = tile * (inputs / kStageValues) + unit / kUnits;
          decode_unit(tag, arranged + stage * decltype(tag)::kStageBytes,
                      static_cast<int>(unit % kUnits), lane, a);
        });
        if (!is_blocks) decode_e4m3(outputs, inputs, arranged, tile, unit, lane, a);
        for (int step = 0; step < 2; ++step)
          for (int r = 0; r < 4; ++r)
            for (int half = 0; half < 2; ++half)  // PTX ISA, fragments of m16n8k16
              out[(tile * 16 + lane / 4 + r % 2 * 8) * inputs + unit * 32 + step * 16 + r / 2 * 8 +
                  lane % 4 * 2 + half] = static_cast<uint16_t>(a[step][r] >> (16 * half));
      }
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

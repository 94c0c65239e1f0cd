// Host build of the row formats and the hash, for tests/native: the same headers, the same bits.
// g++ -std=c++17 -O2 -ffp-contract=off -shared -fPIC
#include "../formats/formats.h"
#include "../formats/requantize.h"
#include "../hash.h"

using namespace engram;

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

// The gate on a CPU.
//
// A token's stream is read twice: three sums over dim, then h + gate * value, product and sum
// rounded one after the other. A sum has LANES partial sums (term i goes to lane i % LANES) that
// are added in a fixed tree; so the bits are those of any vector width, and of none.

#include <math.h>
#include <string.h>

#include <thread>
#include <vector>

#include "clones.h"
#include "engram_cpu.h"

namespace {

constexpr int LANES = 32;
constexpr float CLAMP = 1e-6f;
// Below this many values a thread costs more than it does.
constexpr int64_t THREAD_VALUES = 1 << 19;

ENGRAM_INLINE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

ENGRAM_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ENGRAM_INLINE float widen(uint16_t value) { return from_bits(uint32_t(value) << 16); }
ENGRAM_INLINE float widen(float value) { return value; }

// To nearest, ties to even; a NaN stays one.
ENGRAM_INLINE void narrow(float value, uint16_t* to) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *to = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
ENGRAM_INLINE void narrow(float value, float* to) { *to = value; }

ENGRAM_INLINE float total(float* lanes) {
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// exp of x <= 0, to less than 2^-50: 2^k * exp(r) with |r| <= ln(2) / 2 by its power series.
double exp_of_negative(double x) {
  if (x < -708.0) return 0.0;
  const double k = floor(x * 1.4426950408889634 + 0.5);
  const double r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
  double sum = 1.0;
  for (int n = 14; n > 0; --n) sum = 1.0 + sum * (r / n);
  const uint64_t power = uint64_t(int64_t(k) + 1023) << 52;
  double scale;
  memcpy(&scale, &power, sizeof scale);
  return sum * scale;
}

// sigmoid of the signed square root; NaN stays NaN, and -0 differs from +0.
float gate_of(float dot) {
  const float size = fabsf(dot);
  const float root = sqrtf(size < CLAMP ? CLAMP : size);
  if (root != root) return root;
  const double e = exp_of_negative(-double(root));
  return float((signbit(dot) ? e : 1.0) / (1.0 + e));
}

struct Sums {
  float h, key, dot;
};

template <typename T>
ENGRAM_INLINE Sums sums(const T* h, const uint16_t* key, const float* qk, int64_t dim) {
  float hh[LANES] = {}, kk[LANES] = {}, hk[LANES] = {};
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES)
    for (int i = 0; i < LANES; ++i) {
      const float x = widen(h[d + i]), k = widen(key[d + i]);
      hh[i] += x * x;
      kk[i] += k * k;
      hk[i] += x * qk[d + i] * k;
    }
  for (int i = 0; d + i < dim; ++i) {
    const float x = widen(h[d + i]), k = widen(key[d + i]);
    hh[i] += x * x;
    kk[i] += k * k;
    hk[i] += x * qk[d + i] * k;
  }
  return {total(hh), total(kk), total(hk)};
}

template <typename T>
ENGRAM_INLINE void update(const T* h, const uint16_t* value, float gate, T* out, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) narrow(widen(h[d]) + gate * widen(value[d]), &out[d]);
}

template <typename T>
ENGRAM_INLINE void stream(const T* h, const uint16_t* key, const uint16_t* value, const float* qk,
                          T* out, int64_t dim, float eps) {
  const Sums sum = sums(h, key, qk, dim);
  const float size = float(dim);
  const float rstd = (1.0f / sqrtf(sum.h / size + eps)) * (1.0f / sqrtf(sum.key / size + eps));
  const float dot = sum.dot * rstd * float(1.0 / sqrt(double(dim)));
  update(h, value, gate_of(dot), out, dim);
}

ENGRAM_CLONES void stream_bf16(const uint16_t* h, const uint16_t* key, const uint16_t* value,
                               const float* qk, uint16_t* out, int64_t dim, float eps) {
  stream(h, key, value, qk, out, dim, eps);
}

ENGRAM_CLONES void stream_f32(const float* h, const uint16_t* key, const uint16_t* value,
                              const float* qk, float* out, int64_t dim, float eps) {
  stream(h, key, value, qk, out, dim, eps);
}

void gate_tokens(const engram_cpu_gate_params& p, int64_t begin, int64_t end) {
  const int64_t width = p.hc_mult * p.dim, slot_width = width + p.dim;
  const int64_t bytes = width * (p.is_f32 ? 4 : 2);
  for (int64_t t = begin; t < end; ++t) {
    if (p.is_dead != nullptr && p.is_dead[t]) {
      if (p.out != p.residual)
        memcpy(static_cast<char*>(p.out) + t * bytes,
               static_cast<const char*>(p.residual) + t * bytes, size_t(bytes));
      continue;
    }
    const int64_t slot = p.slots == nullptr ? t : p.slots[t];
    const uint16_t* key = static_cast<const uint16_t*>(p.kv) + slot * slot_width;
    const uint16_t* value = key + width;
    for (int64_t c = 0; c < p.hc_mult; ++c) {
      const int64_t at = t * width + c * p.dim;
      const float* qk = p.qk + c * p.dim;
      if (p.is_f32)
        stream_f32(static_cast<const float*>(p.residual) + at, key + c * p.dim, value, qk,
                   static_cast<float*>(p.out) + at, p.dim, p.eps);
      else
        stream_bf16(static_cast<const uint16_t*>(p.residual) + at, key + c * p.dim, value, qk,
                    static_cast<uint16_t*>(p.out) + at, p.dim, p.eps);
    }
  }
}

// Every slot of a live token is there.
bool are_slots(const int64_t* slots, const uint8_t* is_dead, int64_t num_tokens,
               int64_t num_slots) {
  if (slots == nullptr) return num_tokens <= num_slots;
  for (int64_t t = 0; t < num_tokens; ++t)
    if (!(is_dead != nullptr && is_dead[t]) && (slots[t] < 0 || slots[t] >= num_slots))
      return false;
  return true;
}

}  // namespace

extern "C" int32_t engram_cpu_gate(const engram_cpu_gate_params* params) {
  const engram_cpu_gate_params& p = *params;
  if (p.num_tokens < 0 || p.dim < 1 || p.hc_mult < 1) return 1;
  if (!are_slots(p.slots, p.is_dead, p.num_tokens, p.num_slots)) return 1;
  int64_t parts = p.num_tokens * p.hc_mult * p.dim / THREAD_VALUES;
  if (parts > p.num_threads) parts = p.num_threads;
  if (parts < 2) {
    gate_tokens(p, 0, p.num_tokens);
    return 0;
  }
  std::vector<std::thread> threads;
  int64_t begun = 0;
  const auto end_of = [&](int64_t part) { return p.num_tokens * (part + 1) / parts; };
  try {
    for (int64_t part = 0; part + 1 < parts; ++part) {
      threads.emplace_back(gate_tokens, p, begun, end_of(part));
      begun = end_of(part);
    }
  } catch (...) {  // no thread to be had: the rest is done here
  }
  gate_tokens(p, begun, p.num_tokens);
  for (std::thread& thread : threads) thread.join();
  return 0;
}

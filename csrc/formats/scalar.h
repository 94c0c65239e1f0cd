// Scalars of the row formats, the same bits on host and device: no FMA, no flush to zero.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define ENGRAM_HD __host__ __device__ __forceinline__
#else
#define ENGRAM_HD inline
#endif

namespace engram {

// Reads a T whose address is a multiple of sizeof(T).
template <class T>
ENGRAM_HD T load(const uint8_t* p) {
#ifdef __CUDA_ARCH__
  return __ldg(reinterpret_cast<const T*>(p));
#else
  T value;
  memcpy(&value, p, sizeof value);
  return value;
#endif
}

struct Bytes8 {
  uint32_t word[2];
  ENGRAM_HD uint32_t byte(int i) const { return (word[i >> 2] >> (8 * (i & 3))) & 0xFFu; }
};

// Eight bytes at any address: whole words around them and a funnel shift. Reads at most three
// bytes behind the eighth.
ENGRAM_HD Bytes8 load_bytes8(const uint8_t* p) {
#ifdef __CUDA_ARCH__
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  const unsigned shift = 8u * static_cast<unsigned>(address & 3);
  const uint32_t low = __ldg(words), middle = __ldg(words + 1);
  const uint32_t high = shift ? __ldg(words + 2) : 0u;
  return {{__funnelshift_r(low, middle, shift), __funnelshift_r(middle, high, shift)}};
#else
  Bytes8 bytes;
  memcpy(bytes.word, p, sizeof bytes.word);
  return bytes;
#endif
}

// Eight bytes at a multiple of four.
ENGRAM_HD Bytes8 load_bytes8_aligned(const uint8_t* p) {
  return {{load<uint32_t>(p), load<uint32_t>(p + 4)}};
}

// Where all but odd row lengths keep the alignment: two loads then, and no shift.
ENGRAM_HD Bytes8 load_bytes8_mostly_aligned(const uint8_t* p) {
  if ((reinterpret_cast<uintptr_t>(p) & 3) == 0) return load_bytes8_aligned(p);
  return load_bytes8(p);
}

ENGRAM_HD float bits_to_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

ENGRAM_HD uint32_t float_to_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

ENGRAM_HD float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

ENGRAM_HD float sub(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

ENGRAM_HD float half_to_float(uint16_t bits) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(bits));
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24 is exact
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return bits_to_float(float_to_bits(magnitude) | sign);
  }
  if (exponent == 31) return bits_to_float(sign | 0x7F800000u | (mantissa << 13));
  return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

ENGRAM_HD float bf16_to_float(uint16_t bits) {
  return bits_to_float(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; NaN becomes the canonical 0x7FFF of the hardware's conversion.
ENGRAM_HD uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Two e4m3 codes in the low 16 bits -> their values. The bits of an e4m3 code, moved under f16's
// exponent, are the value times 2^-8, subnormals included; only NaN (0x7F, 0xFF) differs.
ENGRAM_HD void e4m3_pair_to_float(uint32_t codes, float& low, float& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  low = half_to_float(static_cast<uint16_t>(halves));
  high = half_to_float(static_cast<uint16_t>(halves >> 16));
#else
  const uint32_t a = codes & 0xFFu, b = (codes >> 8) & 0xFFu;
  low = mul(half_to_float(static_cast<uint16_t>(((a & 0x80u) << 8) | ((a & 0x7Fu) << 7))), 256.0f);
  high = mul(half_to_float(static_cast<uint16_t>(((b & 0x80u) << 8) | ((b & 0x7Fu) << 7))), 256.0f);
  if ((a & 0x7Fu) == 0x7Fu) low = bits_to_float(0x7FC00000u);
  if ((b & 0x7Fu) == 0x7Fu) high = bits_to_float(0x7FC00000u);
#endif
}

// 2^(code - 127); code 0 is the subnormal 2^-127, 255 is NaN.
ENGRAM_HD float e8m0_to_float(uint32_t code) {
  if (code == 0) return bits_to_float(0x00400000u);
  if (code == 255) return bits_to_float(0x7FC00000u);
  return bits_to_float(code << 23);
}

}  // namespace engram

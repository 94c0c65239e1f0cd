// Window -> row ids. id = (t0*m0 ^ t1*m1 ^ ...) floor-mod prime + offset, in wrapping int64.
#pragma once

#include "engram.h"
#include "formats/scalar.h"

namespace engram {

ENGRAM_HD uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// floor((2^64 - 1) / prime): then quotient estimates below are at most one too small.
inline uint64_t reciprocal(int64_t prime) { return ~uint64_t{0} / static_cast<uint64_t>(prime); }

// Remainder of floor division, by a multiplication: 64-bit division costs some 100 instructions.
ENGRAM_HD int64_t floor_mod(int64_t value, int64_t prime, uint64_t reciprocal_of_prime) {
  const bool is_negative = value < 0;
  const uint64_t magnitude = static_cast<uint64_t>(is_negative ? ~value : value);
  const uint64_t quotient = high_product(magnitude, reciprocal_of_prime);
  uint64_t rest = magnitude - quotient * static_cast<uint64_t>(prime);
  if (rest >= static_cast<uint64_t>(prime)) rest -= static_cast<uint64_t>(prime);
  return is_negative ? prime - 1 - static_cast<int64_t>(rest) : static_cast<int64_t>(rest);
}

// id(i): the i-th id of the window, newest first. Straight-line up to kMost ids: the loads of a
// window then wait together.
template <int kMost, class Id>
ENGRAM_HD uint64_t mix_window(const engram_hash& hash, Id&& id, int order) {
  uint64_t mixed = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < kMost; ++i)
    if (i < order)
      mixed ^= static_cast<uint64_t>(static_cast<int64_t>(id(i))) *
               static_cast<uint64_t>(hash.multipliers[i]);
  return mixed;
}

template <class Id>
ENGRAM_HD int64_t hash_row_id(const engram_hash& hash, Id&& id, int col) {
  int order = 2;  // how many ids of the window take part; a division costs more than the loop
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
  for (int end = hash.num_heads; end <= col; end += hash.num_heads) ++order;
  const uint64_t mixed = hash.max_ngram_size <= 4 ? mix_window<4>(hash, id, order)
                                                  : mix_window<ENGRAM_MAX_NGRAM>(hash, id, order);
  return floor_mod(static_cast<int64_t>(mixed), hash.primes[col], hash.reciprocals[col]) +
         hash.offsets[col];
}

}  // namespace engram

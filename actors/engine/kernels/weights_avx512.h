// Scores of prompts' attention to weights in bfloat16.
#pragma once

#include <immintrin.h>

#include "exponential.h"
#include "vector_avx512.h"

namespace equipoise::avx512 {

// Scores [key][16 lanes], of a multiple of 4 keys, to weights in pairs of keys: [pair][lane][2]. Returns the sums of the
// rounded ones.
inline Vector weigh_pairs(const float* scores, int64_t count, Vector factor, Vector shift, bf16* weights) {
  // Of two vectors of 16 bfloat16 one after the other, one of each in turn.
  alignas(64) static constexpr uint16_t kInTurn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i in_turn = _mm512_load_si512(kInTurn);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  const auto pair = [&](int64_t key) {
    const Vector first = power_of_two(Vector::load(scores + key * Vector::kWidth).times_plus(factor, shift));
    const Vector second = power_of_two(Vector::load(scores + (key + 1) * Vector::kWidth).times_plus(factor, shift));
    const __m512i both = _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
    _mm512_store_si512(weights + key * Vector::kWidth, both);
    return (__m512bh)both;
  };
  for (int64_t key = 0; key < count; key += 4) {
    even = _mm512_dpbf16_ps(even, pair(key), ones);
    odd = _mm512_dpbf16_ps(odd, pair(key + 2), ones);
  }
  return Vector{_mm512_add_ps(even, odd)};
}

}  // namespace equipoise::avx512

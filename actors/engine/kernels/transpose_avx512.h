// Sixteen rows of sixteen numbers of 32 bits, or of pairs of bfloat16, turned over.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace equipoise::avx512 {

constexpr int kSide = 16;

inline void transpose(__m512i v[kSide]) {
  __m512i t[kSide];
  for (int i = 0; i < kSide; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < kSide; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Now 128-bit lane l of v[4 a + b] has column 4 l + b of rows 4 a to 4 a + 3.
  for (int b = 0; b < 4; ++b) {
    __m512i low01 = _mm512_shuffle_i32x4(v[b], v[b + 4], 0x44), high01 = _mm512_shuffle_i32x4(v[b], v[b + 4], 0xEE);
    __m512i low23 = _mm512_shuffle_i32x4(v[b + 8], v[b + 12], 0x44);
    __m512i high23 = _mm512_shuffle_i32x4(v[b + 8], v[b + 12], 0xEE);
    t[b] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    t[b + 4] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
    t[b + 8] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    t[b + 12] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
  }
  for (int i = 0; i < kSide; ++i) v[i] = t[i];
}

// Makes [pair of 16][row of 16][2] of 16 rows of 32 numbers, of which `rows` and `numbers` are there; row_at(i) says where
// one begins. Rows that aren't there are zeros, and so is what an odd last number lacks; other pairs are not written.
template <class RowAt>
void pack_pairs(const RowAt& row_at, int64_t rows, int64_t numbers, bf16* target) {
  const __mmask32 present = numbers < 2 * kSide ? (1u << numbers) - 1 : ~0u;
  __m512i v[kSide];
  for (int i = 0; i < kSide; ++i) {
    v[i] = i < rows ? _mm512_maskz_loadu_epi16(present, row_at(i)) : _mm512_setzero_si512();
  }
  transpose(v);
  for (int i = 0; i < kSide && 2 * i < numbers; ++i) _mm512_store_si512(target + i * 2 * kSide, v[i]);
}

}  // namespace equipoise::avx512

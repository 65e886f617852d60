// AVX512-BF16: vdpbf16ps multiplies pairs of bfloat16 and adds them to a float32.
#include <immintrin.h>

#include "products.h"
#include "vector_avx512.h"

namespace equipoise::avx512 {
namespace {

constexpr int kWeightRows = 4;
constexpr int kStep = 32;  // numbers of `in` at a time

__m512bh load(const bf16* source) { return (__m512bh)_mm512_loadu_si512(source); }

__m512bh load(__mmask32 present, const bf16* source) { return (__m512bh)_mm512_maskz_loadu_epi16(present, source); }

// kRows rows of x from `row` on against four rows of the weight, of which `count` are stored.
template <int kRows>
void tile(const Product& p, int64_t row, int64_t column, int count) {
  const bf16* weight[kWeightRows];
  _Pragma("GCC unroll 8")
  for (int j = 0; j < kWeightRows; ++j) weight[j] = p.weight + (column + (j < count ? j : 0)) * p.in;
  const bf16* x = p.x + row * p.in;
  __m512 total[kRows][kWeightRows];
  _Pragma("GCC unroll 8")
  for (int i = 0; i < kRows; ++i)
    _Pragma("GCC unroll 8")
    for (int j = 0; j < kWeightRows; ++j) total[i][j] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + kStep <= p.in; k += kStep) {
    __m512bh w[kWeightRows];
    _Pragma("GCC unroll 8")
    for (int j = 0; j < kWeightRows; ++j) w[j] = load(weight[j] + k);
    _Pragma("GCC unroll 8")
    for (int i = 0; i < kRows; ++i) {
      __m512bh v = load(x + i * p.in + k);
      _Pragma("GCC unroll 8")
      for (int j = 0; j < kWeightRows; ++j) total[i][j] = _mm512_dpbf16_ps(total[i][j], v, w[j]);
    }
  }
  if (k < p.in) {
    const __mmask32 present = (1u << (p.in - k)) - 1;
    __m512bh w[kWeightRows];
    _Pragma("GCC unroll 8")
    for (int j = 0; j < kWeightRows; ++j) w[j] = load(present, weight[j] + k);
    _Pragma("GCC unroll 8")
    for (int i = 0; i < kRows; ++i) {
      __m512bh v = load(present, x + i * p.in + k);
      _Pragma("GCC unroll 8")
      for (int j = 0; j < kWeightRows; ++j) total[i][j] = _mm512_dpbf16_ps(total[i][j], v, w[j]);
    }
  }
  const __mmask8 stored = (1u << count) - 1;
  __m128 bias = _mm_setzero_ps();
  if (p.bias) {
    __m128i bits = _mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(stored, p.bias + column));
    bias = _mm_castsi128_ps(_mm_slli_epi32(bits, 16));
  }
  _Pragma("GCC unroll 8")
  for (int i = 0; i < kRows; ++i) {
    __m128 y = _mm_add_ps(sums({total[i][0]}, {total[i][1]}, {total[i][2]}, {total[i][3]}), bias);
    _mm_mask_storeu_epi16(p.y + (row + i) * p.out + column, stored, (__m128i)_mm_cvtneps_pbh(y));
  }
}

}  // namespace

void product(const Product& p, int64_t first, int64_t last) {
  constexpr int64_t kMost = 6;  // 24 sums, 4 vectors of the weight and one of x: 29 of 32 registers
  // Tiles of nearly the same height: each reads the weight again.
  const int64_t tiles = (p.rows + kMost - 1) / kMost;
  for (int64_t column = first; column < last; column += kWeightRows) {
    const int count = last - column < kWeightRows ? int(last - column) : kWeightRows;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = i * p.rows / tiles;
      switch ((i + 1) * p.rows / tiles - row) {
        case 1: tile<1>(p, row, column, count); break;
        case 2: tile<2>(p, row, column, count); break;
        case 3: tile<3>(p, row, column, count); break;
        case 4: tile<4>(p, row, column, count); break;
        case 5: tile<5>(p, row, column, count); break;
        case 6: tile<6>(p, row, column, count); break;
      }
    }
  }
}

}  // namespace equipoise::avx512

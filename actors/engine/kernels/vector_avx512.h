// Sixteen float32.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace equipoise::avx512 {

struct Vector {
  static constexpr int kWidth = 16;
  // Queries that attention keeps sums of at a time: as many as the registers hold.
  static constexpr int kQueries = 4;
  __m512 v;

  static Vector all(float value) { return {_mm512_set1_ps(value)}; }
  static Vector load(const float* source) { return {_mm512_loadu_ps(source)}; }
  static Vector load(const bf16* source) { return widen(_mm256_loadu_si256((const __m256i*)source)); }
  // The first `count` numbers, and zeros.
  static Vector load(const float* source, int count) { return {_mm512_maskz_loadu_ps(first(count), source)}; }
  static Vector load(const bf16* source, int count) { return widen(_mm256_maskz_loadu_epi16(first(count), source)); }
  void store(float* target) const { _mm512_storeu_ps(target, v); }
  void store(bf16* target) const { _mm256_storeu_si256((__m256i*)target, (__m256i)_mm512_cvtneps_pbh(v)); }
  void store(float* target, int count) const { _mm512_mask_storeu_ps(target, first(count), v); }
  void store(bf16* target, int count) const {
    _mm256_mask_storeu_epi16(target, first(count), (__m256i)_mm512_cvtneps_pbh(v));
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float greatest() const { return _mm512_reduce_max_ps(v); }
  // this * factor + term
  Vector times_plus(Vector factor, Vector term) const { return {_mm512_fmadd_ps(v, factor.v, term.v)}; }
  Vector least(Vector other) const { return {_mm512_min_ps(v, other.v)}; }
  Vector greatest(Vector other) const { return {_mm512_max_ps(v, other.v)}; }
  // `other` where left < right, which is false for NaN
  Vector unless_less(Vector left, Vector right, Vector other) const {
    return {_mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(left.v, right.v, _CMP_LT_OQ), other.v)};
  }
  Vector rounded() const { return {_mm512_roundscale_ps(v, 0)}; }
  // this * 2^exponent, for whole exponents
  Vector scaled(Vector exponent) const { return {_mm512_scalef_ps(v, exponent.v)}; }

 private:
  static __mmask16 first(int count) { return (1u << count) - 1; }
  static Vector widen(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
};

inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.v, b.v)}; }

// The sums over each of four vectors.
inline __m128 sums(Vector a, Vector b, Vector c, Vector d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

}  // namespace equipoise::avx512

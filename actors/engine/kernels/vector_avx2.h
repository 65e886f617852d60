// Eight float32.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace equipoise::avx2 {

struct Vector {
  static constexpr int kWidth = 8;
  // Queries that attention keeps sums of at a time: as many as the registers hold.
  static constexpr int kQueries = 2;
  __m256 v;

  static Vector all(float value) { return {_mm256_set1_ps(value)}; }
  static Vector load(const float* source) { return {_mm256_loadu_ps(source)}; }
  static Vector load(const bf16* source) { return widen(_mm_loadu_si128((const __m128i*)source)); }
  // The first `count` numbers, and zeros.
  static Vector load(const float* source, int count) { return part(source, count); }
  static Vector load(const bf16* source, int count) { return part(source, count); }
  void store(float* target) const { _mm256_storeu_ps(target, v); }
  // To the nearest, ties to even; NaN stays NaN.
  void store(bf16* target) const {
    const __m256i bits = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    __m256i high = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), odd));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    high = _mm256_blendv_epi8(high, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    high = _mm256_srli_epi32(high, 16);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i*)target, _mm256_castsi256_si128(halves));
  }
  void store(float* target, int count) const { store_part(target, count); }
  void store(bf16* target, int count) const { store_part(target, count); }
  float sum() const {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  float greatest() const {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  // this * factor + term
  Vector times_plus(Vector factor, Vector term) const { return {_mm256_fmadd_ps(v, factor.v, term.v)}; }
  Vector least(Vector other) const { return {_mm256_min_ps(v, other.v)}; }
  Vector greatest(Vector other) const { return {_mm256_max_ps(v, other.v)}; }
  // `other` where left < right, which is false for NaN
  Vector unless_less(Vector left, Vector right, Vector other) const {
    return {_mm256_blendv_ps(v, other.v, _mm256_cmp_ps(left.v, right.v, _CMP_LT_OQ))};
  }
  Vector rounded() const { return {_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // this * 2^exponent, for whole exponents from -126 to 127
  Vector scaled(Vector exponent) const {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)))};
  }

 private:
  static Vector widen(__m128i bits) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  template <class T>
  static Vector part(const T* source, int count) {
    T copy[kWidth] = {};
    for (int i = 0; i < count; ++i) copy[i] = source[i];
    return load(copy);
  }
  template <class T>
  void store_part(T* target, int count) const {
    T copy[kWidth];
    store(copy);
    for (int i = 0; i < count; ++i) target[i] = copy[i];
  }
};

inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.v, b.v)}; }

// The sums over each of four vectors.
inline __m128 sums(Vector a, Vector b, Vector c, Vector d) {
  const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

}  // namespace equipoise::avx2

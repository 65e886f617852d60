// AVX2 with FMA: bfloat16 is widened to float32, which is exact.
#include "products.h"
#include "vector_avx2.h"

namespace equipoise::avx2 {
namespace {

constexpr int kWeightRows = 4;

// kRows rows of x from `row` on against four rows of the weight, of which `count` are stored.
template <int kRows>
void tile(const Product& p, int64_t row, int64_t column, int count) {
  const bf16* weight[kWeightRows];
  for (int j = 0; j < kWeightRows; ++j) weight[j] = p.weight + (column + (j < count ? j : 0)) * p.in;
  const bf16* const x = p.x + row * p.in;
  Vector total[kRows][kWeightRows];
  _Pragma("GCC unroll 4")
  for (int i = 0; i < kRows; ++i)
    _Pragma("GCC unroll 4")
    for (int j = 0; j < kWeightRows; ++j) total[i][j] = Vector::all(0);
  const auto add = [&](const auto& load, int64_t k) {
    Vector w[kWeightRows];
    _Pragma("GCC unroll 4")
    for (int j = 0; j < kWeightRows; ++j) w[j] = load(weight[j] + k);
    _Pragma("GCC unroll 4")
    for (int i = 0; i < kRows; ++i) {
      const Vector v = load(x + i * p.in + k);
      _Pragma("GCC unroll 4")
      for (int j = 0; j < kWeightRows; ++j) total[i][j] = v.times_plus(w[j], total[i][j]);
    }
  };
  int64_t k = 0;
  for (; k + Vector::kWidth <= p.in; k += Vector::kWidth) add([](const bf16* from) { return Vector::load(from); }, k);
  const int rest = int(p.in - k);
  if (rest) add([rest](const bf16* from) { return Vector::load(from, rest); }, k);
  const Vector bias = p.bias ? Vector::load(p.bias + column, count) : Vector::all(0);
  _Pragma("GCC unroll 4")
  for (int i = 0; i < kRows; ++i) {
    const __m128 y = sums(total[i][0], total[i][1], total[i][2], total[i][3]);
    const Vector result = Vector{_mm256_insertf128_ps(_mm256_setzero_ps(), y, 0)} + bias;
    result.store(p.y + (row + i) * p.out + column, count);
  }
}

}  // namespace

void product(const Product& p, int64_t first, int64_t last) {
  constexpr int kRows = 2;  // 8 sums, 4 vectors of the weight and one of x: 13 of 16 registers
  for (int64_t column = first; column < last; column += kWeightRows) {
    const int count = last - column < kWeightRows ? int(last - column) : kWeightRows;
    int64_t row = 0;
    for (; row + kRows <= p.rows; row += kRows) tile<kRows>(p, row, column, count);
    if (row < p.rows) tile<1>(p, row, column, count);
  }
}

}  // namespace equipoise::avx2

// AVX512-BF16: vdpbf16ps multiplies pairs of bfloat16 and adds them to a float32.
//
// A tile is some rows of x against some rows of the weight, its sums all in registers: one of each row and column, so
// that the shape of a tile does not change the order of adding. x is packed by tiles: rows as long as a page of memory
// would push each other out of the first cache. The weight is asked for ahead: its rows of a few KiB are too short for
// the processor to see by itself what is read next, and a step of few rows is as fast as memory.
#include <immintrin.h>

#include <algorithm>

#include "products.h"
#include "vector_avx512.h"

namespace equipoise::avx512 {
namespace {

constexpr int kStep = 32;             // numbers of `in` at a time
constexpr int64_t kMost = 6;          // rows by four columns: 24 sums, 4 vectors of the weight and one of x of 32
constexpr int64_t kMostOfPairs = 8;   // rows by two columns, which read the weight once where two tiles would twice
constexpr int64_t kAhead = 4 << 10;   // numbers of the weight, and two tiles' at least
constexpr int64_t kNearby = 1 << 18;  // numbers of x that stay in the second cache beside the weight

// How a tile asks for what tiles after it read.
enum class Fetch {
  kNone,    // another tile has, of the same columns
  kFirst,   // the next columns into the first cache, since multiplying takes less time than the way from the second
  kSecond,  // later ones into the second cache
  kBoth,    // later ones into the second, and the next ones from there into the first
};

int64_t padded(int64_t in) { return (in + kStep - 1) / kStep * kStep; }

// Of tile `i`: tiles are of nearly the same height, since each reads the weight again.
int64_t first_row(const Product& p, int64_t i) { return i * p.rows / tiles(p); }

__m512bh load(const bf16* source) { return (__m512bh)_mm512_loadu_si512(source); }

__m512bh load(__mmask32 present, const bf16* source) { return (__m512bh)_mm512_maskz_loadu_epi16(present, source); }

// kRows rows from `row` on, which `x` has packed, against kColumns rows of the weight, of which `count` are stored.
template <int kRows, int kColumns, Fetch kFetch>
void tile(const Product& p, const bf16* x, int64_t row, int64_t column, int count) {
  const bf16* weight[kColumns];
  _Pragma("GCC unroll 8")
  for (int j = 0; j < kColumns; ++j) weight[j] = p.weight + (column + (j < count ? j : 0)) * p.in;
  const int64_t size = kColumns * p.in;
  const bf16* const next = weight[0] + size;
  const int64_t farther = size * std::max<int64_t>(2, (kAhead + size - 1) / size);
  const bf16* const ahead = kFetch == Fetch::kFirst ? next : weight[0] + farther;
  __m512 total[kRows][kColumns];
  _Pragma("GCC unroll 8")
  for (int i = 0; i < kRows; ++i)
    _Pragma("GCC unroll 8")
    for (int j = 0; j < kColumns; ++j) total[i][j] = _mm512_setzero_ps();
  const auto add = [&](int64_t k, const __m512bh(&w)[kColumns]) __attribute__((always_inline)) {
    _Pragma("GCC unroll 8")
    for (int i = 0; i < kRows; ++i) {
      const __m512bh v = load(x + k * kRows + i * kStep);
      _Pragma("GCC unroll 8")
      for (int j = 0; j < kColumns; ++j) total[i][j] = _mm512_dpbf16_ps(total[i][j], v, w[j]);
    }
  };
  int64_t k = 0;
  for (; k + kStep <= p.in; k += kStep) {
    __m512bh w[kColumns];
    _Pragma("GCC unroll 8")
    for (int j = 0; j < kColumns; ++j) {
      w[j] = load(weight[j] + k);
      // In the order in which it lies in memory, whatever the order of reading: the processor then reads on by itself.
      const bf16* const later = ahead + k * kColumns + j * kStep;
      if (kFetch == Fetch::kFirst) _mm_prefetch(later, _MM_HINT_NTA);
      if (kFetch == Fetch::kSecond || kFetch == Fetch::kBoth) _mm_prefetch(later, _MM_HINT_T1);
      if (kFetch == Fetch::kBoth) _mm_prefetch(next + j * p.in + k, _MM_HINT_T0);
    }
    add(k, w);
  }
  if (k < p.in) {
    const __mmask32 present = (1u << (p.in - k)) - 1;
    __m512bh w[kColumns];
    _Pragma("GCC unroll 8")
    for (int j = 0; j < kColumns; ++j) w[j] = load(present, weight[j] + k);
    add(k, w);
  }
  const __mmask8 stored = (1u << count) - 1;
  __m128 bias = _mm_setzero_ps();
  if (p.bias) {
    __m128i bits = _mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(stored, p.bias + column));
    bias = _mm_castsi128_ps(_mm_slli_epi32(bits, 16));
    if (kColumns == 2) bias = _mm_movelh_ps(bias, bias);
  }
  constexpr int kAtOnce = 4 / kColumns;  // rows
  _Pragma("GCC unroll 8")
  for (int i = 0; i < kRows; i += kAtOnce) {
    const auto& last = total[std::min(i + kAtOnce, kRows) - 1];
    const __m128 y =
        _mm_add_ps(sums({total[i][0]}, {total[i][1]}, {last[kColumns - 2]}, {last[kColumns - 1]}), bias);
    const __m128i rounded = (__m128i)_mm_cvtneps_pbh(y);
    bf16* const target = p.y + (row + i) * p.out + column;
    _mm_mask_storeu_epi16(target, stored, rounded);
    if (kAtOnce == 2 && i + 1 < kRows) _mm_mask_storeu_epi16(target + p.out, stored, _mm_srli_si128(rounded, 4));
  }
}

template <int kColumns, Fetch kFetch>
void tile(const Product& p, const bf16* x, int64_t row, int64_t rows, int64_t column, int count) {
  switch (rows) {
    case 1: return tile<1, kColumns, kFetch>(p, x, row, column, count);
    case 2: return tile<2, kColumns, kFetch>(p, x, row, column, count);
    case 3: return tile<3, kColumns, kFetch>(p, x, row, column, count);
    case 4: return tile<4, kColumns, kFetch>(p, x, row, column, count);
    case 5: return tile<5, kColumns, kFetch>(p, x, row, column, count);
    case 6: return tile<6, kColumns, kFetch>(p, x, row, column, count);
    case 7: if constexpr (kColumns == 2) return tile<7, kColumns, kFetch>(p, x, row, column, count);
    case 8: if constexpr (kColumns == 2) return tile<8, kColumns, kFetch>(p, x, row, column, count);
  }
}

// Columns of y from `first` to `last`, of the rows of tiles from `top` to `bottom`.
template <int kColumns, Fetch kFetch>
void product(const Product& p, const bf16* packed, int64_t first, int64_t last, int64_t top, int64_t bottom) {
  for (int64_t column = first; column < last; column += kColumns) {
    const int count = int(std::min<int64_t>(last - column, kColumns));
    for (int64_t i = top; i < bottom; ++i) {
      const int64_t row = first_row(p, i), rows = first_row(p, i + 1) - row;
      const bf16* const x = packed + row * padded(p.in);
      if (i == top) {
        tile<kColumns, kFetch>(p, x, row, rows, column, count);
      } else {
        tile<kColumns, Fetch::kNone>(p, x, row, rows, column, count);
      }
    }
  }
}

}  // namespace

int64_t tiles(const Product& p) { return p.rows <= kMostOfPairs ? p.rows > 0 : (p.rows + kMost - 1) / kMost; }

int64_t packed_bytes(const Product& p) { return p.rows * padded(p.in) * int64_t(sizeof(bf16)); }

void pack(const Product& p, void* packed, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = first_row(p, i), end = first_row(p, i + 1);
    bf16* target = static_cast<bf16*>(packed) + row * padded(p.in);
    for (int64_t k = 0; k < p.in; k += kStep) {
      const __mmask32 present = p.in - k < kStep ? (1u << (p.in - k)) - 1 : ~0u;
      for (int64_t j = row; j < end; ++j, target += kStep) {
        _mm512_store_si512(target, (__m512i)load(present, p.x + j * p.in + k));
      }
    }
  }
}

void product(const Product& p, const void* packed, int64_t first, int64_t last) {
  const bf16* const x = static_cast<const bf16*>(packed);
  if (p.rows <= 2) return product<4, Fetch::kFirst>(p, x, first, last, 0, tiles(p));
  if (p.rows <= kMost) return product<4, Fetch::kSecond>(p, x, first, last, 0, tiles(p));
  if (p.rows <= kMostOfPairs) return product<2, Fetch::kBoth>(p, x, first, last, 0, tiles(p));
  const int64_t parts = (p.rows * p.in + kNearby - 1) / kNearby;
  for (int64_t i = 0; i < parts; ++i) {
    product<4, Fetch::kBoth>(p, x, first, last, i * tiles(p) / parts, (i + 1) * tiles(p) / parts);
  }
}

}  // namespace equipoise::avx512

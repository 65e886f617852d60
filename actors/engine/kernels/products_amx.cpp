// AMX: a tile product adds [16, 32] x [32, 16] bfloat16 to [16, 16] float32. One operand of it is read as it is stored:
// here the weight, each number once. The other one, x, is packed before, with its pairs of `in` beside each other:
// [pair of 16][row of 16][2]. Sums come out as [out, rows].
#include <immintrin.h>

#include "products.h"

namespace equipoise::amx {
namespace {

constexpr int kTile = 16;    // rows of a tile, and numbers of float32 in a row of one
constexpr int kDepth = 32;   // numbers of `in` a tile product
constexpr int kPacked = kTile * kDepth;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void transpose(__m512i v[kTile]) {
  __m512i t[kTile];
  for (int i = 0; i < kTile; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < kTile; i += 4) {
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
  for (int i = 0; i < kTile; ++i) v[i] = t[i];
}

// A tile of 16 rows, of which `rows` are there, of a matrix with rows of `stride` numbers, packed.
void pack_tile(const bf16* source, int64_t stride, int64_t rows, bf16* target) {
  __m512i v[kTile];
  for (int i = 0; i < kTile; ++i) v[i] = i < rows ? _mm512_loadu_si512(source + i * stride) : _mm512_setzero_si512();
  transpose(v);
  for (int i = 0; i < kTile; ++i) _mm512_store_si512(target + i * kDepth, v[i]);
}

__m512 bias_of(const Product& p, int64_t column) {
  if (!p.bias) return _mm512_setzero_ps();
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(p.bias + column)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

// Stores the sums of one tile.
void store(const Product& p, const float* sums, int64_t row, int64_t column) {
  __m512i v[kTile];
  for (int i = 0; i < kTile; ++i) v[i] = _mm512_load_si512(sums + i * kTile);
  transpose(v);
  const __m512 bias = bias_of(p, column);
  const int64_t count = p.rows - row < kTile ? p.rows - row : kTile;
  for (int i = 0; i < count; ++i) {
    const __m512 y = _mm512_add_ps(_mm512_castsi512_ps(v[i]), bias);
    _mm256_storeu_si256((__m256i*)(p.y + (row + i) * p.out + column), (__m256i)_mm512_cvtneps_pbh(y));
  }
}

int64_t row_tiles(const Product& p) { return (p.rows + kTile - 1) / kTile; }

}  // namespace

int64_t packed_bytes(const Product& p) { return row_tiles(p) * kTile * p.in * int64_t(sizeof(bf16)); }

void pack(const Product& p, void* packed) {
  bf16* target = static_cast<bf16*>(packed);
  for (int64_t row = 0; row < p.rows; row += kTile) {
    for (int64_t k = 0; k < p.in; k += kDepth, target += kPacked) {
      pack_tile(p.x + row * p.in + k, p.in, p.rows - row, target);
    }
  }
}

void product(const Product& p, const void* packed, int64_t first, int64_t last) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const bf16* const x = static_cast<const bf16*>(packed);
  const int64_t stride = p.in * sizeof(bf16), steps = p.in / kDepth;
  alignas(64) float sums[4][kTile * kTile];
  int64_t column = first;
  for (; column + 4 * kTile <= last; column += 4 * kTile) {
    const bf16* const w = p.weight + column * p.in;
    for (int64_t tile = 0; tile < row_tiles(p); ++tile) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t step = 0; step < steps; ++step) {
        const bf16* const here = w + step * kDepth;
        _tile_loadd(7, x + (tile * steps + step) * kPacked, 64);
        _tile_loadd(4, here, stride);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, here + kTile * p.in, stride);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(6, here + 2 * kTile * p.in, stride);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(4, here + 3 * kTile * p.in, stride);
        _tile_dpbf16ps(3, 4, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      for (int i = 0; i < 4; ++i) store(p, sums[i], tile * kTile, column + i * kTile);
    }
  }
  for (; column < last; column += kTile) {
    const bf16* const w = p.weight + column * p.in;
    for (int64_t tile = 0; tile < row_tiles(p); ++tile) {
      _tile_zero(0);
      for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(7, x + (tile * steps + step) * kPacked, 64);
        _tile_loadd(4, w + step * kDepth, stride);
        _tile_dpbf16ps(0, 4, 7);
      }
      _tile_stored(0, sums[0], 64);
      store(p, sums[0], tile * kTile, column);
    }
  }
  _tile_release();
}

}  // namespace equipoise::amx

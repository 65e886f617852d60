// AMX: a tile product adds [16, 32] x [32, 16] bfloat16 to [16, 16] float32. One operand is read as it is stored; the other
// one is packed before, with its pairs of numbers beside each other: [pair of 16][row of 16][2].
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace equipoise::amx {

constexpr int kTile = 16;   // rows of a tile, and numbers of float32 in a row of one
constexpr int kDepth = 32;  // numbers that a tile product multiplies with each other
constexpr int kPacked = kTile * kDepth;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void transpose(__m512i v[kTile]) {
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

// Packs a tile of 16 rows, of which `count` are there; row_at(i) says where one begins.
template <class RowAt>
void pack_tile(const RowAt& row_at, int64_t count, bf16* target) {
  __m512i v[kTile];
  for (int i = 0; i < kTile; ++i) v[i] = i < count ? _mm512_loadu_si512(row_at(i)) : _mm512_setzero_si512();
  transpose(v);
  for (int i = 0; i < kTile; ++i) _mm512_store_si512(target + i * kDepth, v[i]);
}

}  // namespace equipoise::amx

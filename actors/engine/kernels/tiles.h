// AMX: a tile product adds [16, 32] x [32, 16] bfloat16 to [16, 16] float32. One operand is read as it is stored; the other
// one is packed before, with its pairs of numbers beside each other: [pair of 16][row of 16][2].
#pragma once

#include <immintrin.h>

#include "numbers.h"
#include "transpose_avx512.h"

namespace equipoise::amx {

using avx512::transpose;

constexpr int kTile = 16;   // rows of a tile, and numbers of float32 in a row of one
constexpr int kDepth = 32;  // numbers that a tile product multiplies with each other
constexpr int kPacked = kTile * kDepth;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Packs a tile of 16 rows, of which `count` are there; row_at(i) says where one begins.
template <class RowAt>
void pack_tile(const RowAt& row_at, int64_t count, bf16* target) {
  avx512::pack_pairs(row_at, count, kDepth, target);
}

}  // namespace equipoise::amx

// Products by tiles. The weight is read as it is stored, each number once, and x is packed before. Sums come out as
// [out, rows].
#include <immintrin.h>

#include "products.h"
#include "tiles.h"

namespace equipoise::amx {
namespace {

constexpr int kMostTiles = 4;  // of sums at a time
// Up to kMostTiles tiles of rows, what takes long is reading the weight, and each tile of it meets all of them. Of more
// rows, two tiles meet two tiles of the weight, so that each load serves two products, and kPanel columns of the weight
// stay in the second cache while all rows meet them.
constexpr int64_t kPanel = 128;

__m512 bias_of(const Product& p, int64_t column) {
  if (!p.bias) return _mm512_setzero_ps();
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(p.bias + column)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

int64_t row_tiles(const Product& p) { return (p.rows + kTile - 1) / kTile; }

// Stores 16 columns of the `count` rows of a tile, whose sums are [column][row].
void store(const Product& p, const float* sums, int64_t row, int64_t count, int64_t column) {
  constexpr int kFew = 4;  // rows that are sooner picked one by one
  __m512i v[kTile];
  if (count <= kFew) {
    const __m512i columns = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    for (int i = 0; i < count; ++i) v[i] = _mm512_i32gather_epi32(columns, sums + i, sizeof(float));
  } else {
    for (int i = 0; i < kTile; ++i) v[i] = _mm512_load_si512(sums + i * kTile);
    transpose(v);
  }
  const __m512 bias = bias_of(p, column);
  for (int i = 0; i < count; ++i) {
    const __m512 y = _mm512_add_ps(_mm512_castsi512_ps(v[i]), bias);
    _mm256_storeu_si256((__m256i*)(p.y + (row + i) * p.out + column), (__m256i)_mm512_cvtneps_pbh(y));
  }
}

// Sums of the last tiles, which are stored while the next ones are being added up.
class Finished {
 public:
  // Where the tiles of `first` and the following ones, `tiles` of them, go: for 16 columns from `column` on, and if `tall`
  // for the next 16 behind them.
  float* next(int64_t column, int64_t first, int tiles, bool tall = false) {
    now_ ^= 1;
    column_ = column;
    first_ = first;
    tiles_ = tiles;
    columns_ = tall ? 2 : 1;
    return sums_[now_];
  }

  void store_all(const Product& p) {
    const float* sums = sums_[now_];
    for (int c = 0; c < columns_; ++c) {
      for (int i = 0; i < tiles_; ++i, sums += kTile * kTile) {
        const int64_t row = (first_ + i) * kTile, rest = p.rows - row;
        if (rest > 0) store(p, sums, row, rest < kTile ? rest : kTile, column_ + c * kTile);
      }
    }
    columns_ = 0;
  }

 private:
  alignas(64) float sums_[2][kMostTiles * kTile * kTile];
  int now_ = 0, tiles_ = 0, columns_ = 0;
  int64_t column_, first_;
};

// Asks for lines of memory in the order in which they lie. The processor's own reading ahead follows neighbouring lines,
// and tiles of 16 columns that are far apart don't look like that.
class Ahead {
 public:
  // Behind 16 columns of the weight.
  Ahead(const Product& p, const bf16* weight) : Ahead(weight + kTile * p.in + kLead / int64_t(sizeof(bf16))) {}
  explicit Ahead(const bf16* next) : next_(reinterpret_cast<const char*>(next)) {}

  // As much as a tile has.
  void tile() {
    _Pragma("GCC unroll 16")
    for (int line = 0; line < kTile; ++line) _mm_prefetch(next_ + 64 * line, _MM_HINT_T1);
    next_ += 64 * kTile;
  }
  void lines(int64_t count) {
    for (; count > 0; --count, next_ += 64) _mm_prefetch(next_, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t kLead = 2048;  // bytes
  const char* next_;
};

// 16 columns of kTiles tiles of rows, from tile `first` on. The order of adding is the same for any kTiles.
template <int kTiles, bool kAhead>
void columns(const Product& p, const bf16* packed, int64_t column, int64_t first, Finished& finished) {
  const int64_t stride = p.in * int64_t(sizeof(bf16)), steps = p.in / kDepth;
  const bf16* const weight = p.weight + column * p.in;
  const bf16* x = packed + first * steps * kPacked;
  Ahead ahead(p, weight);
  _tile_zero(0);
  if (kTiles > 1) _tile_zero(1);
  if (kTiles > 2) _tile_zero(2);
  if (kTiles > 3) _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, x += kPacked) {
    if (kAhead) ahead.tile();
    _tile_loadd(4, weight + step * kDepth, stride);
    _tile_loadd(5, x, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (kTiles > 1) {
      _tile_loadd(6, x + steps * kPacked, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (kTiles > 2) {
      _tile_loadd(7, x + 2 * steps * kPacked, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (kTiles > 3) {
      _tile_loadd(5, x + 3 * steps * kPacked, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    if (step == steps / 2) finished.store_all(p);
  }
  float* const sums = finished.next(column, first, kTiles);
  _tile_stored(0, sums, 64);
  if (kTiles > 1) _tile_stored(1, sums + kTile * kTile, 64);
  if (kTiles > 2) _tile_stored(2, sums + 2 * kTile * kTile, 64);
  if (kTiles > 3) _tile_stored(3, sums + 3 * kTile * kTile, 64);
}

// `columns` of `count` tiles of rows.
template <bool kAhead>
void columns(const Product& p, const bf16* packed, int64_t column, int64_t first, int64_t count, Finished& finished) {
  switch (count) {
    case 1: columns<1, kAhead>(p, packed, column, first, finished); break;
    case 2: columns<2, kAhead>(p, packed, column, first, finished); break;
    case 3: columns<3, kAhead>(p, packed, column, first, finished); break;
    case 4: columns<4, kAhead>(p, packed, column, first, finished); break;
  }
}

// 32 columns of two tiles of rows, from tile `first` on; the order of adding is that of `columns`. `lines`: how many are
// asked for at a step.
void two_by_two(const Product& p, const bf16* packed, int64_t column, int64_t first, Ahead& ahead, int64_t lines,
                Finished& finished) {
  const int64_t stride = p.in * int64_t(sizeof(bf16)), steps = p.in / kDepth;
  const bf16* const weight = p.weight + column * p.in;
  const bf16* x = packed + first * steps * kPacked;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, x += kPacked) {
    ahead.lines(lines);
    _tile_loadd(4, weight + step * kDepth, stride);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, x + steps * kPacked, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, weight + kTile * p.in + step * kDepth, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (step == steps / 2) finished.store_all(p);
  }
  float* const sums = finished.next(column, first, 2, true);
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTile * kTile, 64);
  _tile_stored(2, sums + 2 * kTile * kTile, 64);
  _tile_stored(3, sums + 3 * kTile * kTile, 64);
}

// `product` of more than kMostTiles tiles of rows.
void product_of_many(const Product& p, const bf16* packed, int64_t first, int64_t last, Finished& finished) {
  const int64_t tiles = row_tiles(p), pairs = (tiles + 1) / 2;
  const int64_t lines = kDepth / pairs;  // the next panel is there when all rows have met this one
  const int64_t whole = first + (last - first) / (2 * kTile) * 2 * kTile;
  for (int64_t panel = first; panel < whole; panel += kPanel) {
    const int64_t end = panel + kPanel < whole ? panel + kPanel : whole;
    Ahead ahead(p.weight + end * p.in);
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      for (int64_t column = panel; column < end; column += 2 * kTile) {
        two_by_two(p, packed, column, tile, ahead, lines, finished);
      }
    }
  }
  if (whole == last) return;
  for (int64_t tile = 0; tile < tiles; tile += kMostTiles) {
    columns<false>(p, packed, whole, tile, tiles - tile < kMostTiles ? tiles - tile : kMostTiles, finished);
  }
}

}  // namespace

int64_t packed_bytes(const Product& p) {
  const int64_t tiles = (row_tiles(p) + 1) / 2 * 2;  // the last of an odd number is read too, and not stored
  return tiles * kTile * p.in * int64_t(sizeof(bf16));
}

void pack(const Product& p, void* packed, int64_t first, int64_t last) {
  bf16* target = static_cast<bf16*>(packed) + first * p.in;
  for (int64_t row = first; row < last; row += kTile) {
    for (int64_t k = 0; k < p.in; k += kDepth, target += kPacked) {
      pack_tile([&](int i) { return p.x + (row + i) * p.in + k; }, p.rows - row, target);
    }
  }
}

void product(const Product& p, const void* packed, int64_t first, int64_t last) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const bf16* const x = static_cast<const bf16*>(packed);
  const int64_t tiles = row_tiles(p);
  Finished finished;
  if (tiles > kMostTiles) {
    product_of_many(p, x, first, last, finished);
  } else {
    for (int64_t column = first; column < last; column += kTile) columns<true>(p, x, column, 0, tiles, finished);
  }
  finished.store_all(p);
  _tile_release();
}

}  // namespace equipoise::amx

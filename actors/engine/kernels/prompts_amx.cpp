// Products of prompts.inc in bfloat16 by tiles. Scores are [key, query]: K is the operand that is read as it is stored,
// from its pages, and queries are packed once. Two rows of weights, of neighbouring keys, make pairs as the other operand
// of weights times V wants them; V is turned over, once for all lanes.
#include "prompts.h"
#include "tiles.h"
#include "vector_avx512.h"
#include "weights_avx512.h"

namespace equipoise::amx {

using avx512::Vector;

#include "prompts.inc"

namespace {

class Tiles {
 public:
  static constexpr float kPowerOf = 1.44269504f;  // log2 e
  static constexpr int kStep = kDepth;

  Tiles(const Item<bf16>& item, Memory& memory)
      : item_(item),
        dim_(item.dim),
        queries_(memory.take<bf16>(item.vectors * dim_ * kTile)),
        values_(memory.take<bf16>(kKeys * dim_)),
        weights_(memory.take<bf16>(kKeys * kTile)) {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }

  static Vector power(Vector x) { return power_of_two(x); }  // 0 for what is hidden

  // The queries of a vector's lanes, a packed tile for each kDepth numbers.
  void pack(int64_t vector) {
    bf16* target = queries_ + vector * dim_ * kTile;
    for (int64_t d = 0; d < dim_; d += kDepth, target += kPacked) {
      pack_tile([&](int i) { return item_.query(vector * kTile + i) + d; }, item_.lanes_of(vector), target);
    }
  }

  // Finds K of `count` tokens from `base` on, and turns their V over: tiles [16 numbers][32 tokens], with zeros for tokens
  // behind the last one, where weights are zero and memory may hold anything.
  void read(int64_t base, int64_t count) {
    const int64_t to_values = item_.prompt.pages.block_tokens * dim_;
    bf16* target = values_;
    for (int64_t i = 0; i < count; i += kDepth) {
      // Where a block ends with the first half of the step, there is none for the second: it is hidden, so any will do.
      const bf16* const first = item_.key(base + i);
      const bf16* const second = i + kTile < count ? item_.key(base + i + kTile) : first;
      keys_[i / kTile] = first;
      keys_[i / kTile + 1] = second;
      for (int64_t d = 0; d < dim_; d += kTile, target += kPacked) {
        __m512i v[kTile];
        for (int pair = 0; pair < kTile; ++pair) {
          const bf16* const tile = pair < kTile / 2 ? first : second;
          const bf16* const value = tile + to_values + (2 * pair % kTile) * dim_ + d;
          const int64_t token = i + 2 * pair;
          const __m512i even = token < count ? widened(value) : _mm512_setzero_si512();
          const __m512i odd = token + 1 < count ? widened(value + dim_) : _mm512_setzero_si512();
          v[pair] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
        }
        transpose(v);
        for (int number = 0; number < kTile; ++number) _mm512_store_si512(target + number * kDepth, v[number]);
      }
    }
  }

  // scores[key][lane] = K . query
  void score(int64_t vector, int64_t count, float* scores) const {
    const bf16* const queries = queries_ + vector * dim_ * kTile;
    int64_t tile = 0;
    for (; (tile + 4) * kTile <= count; tile += 4) score_tiles<4>(queries, tile, scores);
    if (tile * kTile < count) score_tiles<2>(queries, tile, scores);
  }

  // Scores to weights, whose sums are returned.
  Vector weigh(const float* scores, int64_t count, Vector factor, Vector shift) {
    return avx512::weigh_pairs(scores, count, factor, shift, weights_);
  }

  // sums[number][lane] += V . weights
  void mix(const float*, int64_t count, float* sums) const {
    int64_t d = 0;
    for (; d + 4 * kTile <= dim_; d += 4 * kTile) mix_tiles<4>(count, d, sums + d * kTile);
    if (d < dim_) mix_tiles<2>(count, d, sums + d * kTile);
  }

  void store(int64_t vector, const float* sums) const {
    const int64_t lanes = item_.lanes_of(vector);
    for (int64_t d = 0; d < dim_; d += kTile) {
      __m512i v[kTile];
      for (int i = 0; i < kTile; ++i) v[i] = _mm512_load_si512(sums + (d + i) * kTile);
      transpose(v);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        Vector{_mm512_castsi512_ps(v[lane])}.store(item_.out(vector * kTile + lane) + d);
      }
    }
  }

 private:
  static __m512i widened(const bf16* source) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }

  template <int kTiles>
  void score_tiles(const bf16* queries, int64_t tile, float* scores) const {
    const int64_t stride = dim_ * int64_t(sizeof(bf16));
    _tile_zero(0);
    _tile_zero(1);
    if (kTiles > 2) _tile_zero(2);
    if (kTiles > 2) _tile_zero(3);
    for (int64_t d = 0; d < dim_; d += kDepth) {
      _tile_loadd(4, queries + d * kTile, 64);
      _tile_loadd(5, keys_[tile] + d, stride);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, keys_[tile + 1] + d, stride);
      _tile_dpbf16ps(1, 6, 4);
      if (kTiles > 2) {
        _tile_loadd(7, keys_[tile + 2] + d, stride);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, keys_[tile + 3] + d, stride);
        _tile_dpbf16ps(3, 5, 4);
      }
    }
    float* const target = scores + tile * kTile * kTile;
    _tile_stored(0, target, 64);
    _tile_stored(1, target + kTile * kTile, 64);
    if (kTiles > 2) _tile_stored(2, target + 2 * kTile * kTile, 64);
    if (kTiles > 2) _tile_stored(3, target + 3 * kTile * kTile, 64);
  }

  template <int kTiles>
  void mix_tiles(int64_t count, int64_t number, float* sums) const {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTile * kTile, 64);
    if (kTiles > 2) _tile_loadd(2, sums + 2 * kTile * kTile, 64);
    if (kTiles > 2) _tile_loadd(3, sums + 3 * kTile * kTile, 64);
    for (int64_t key = 0; key < count; key += kDepth) {
      const bf16* const values = values_ + key * dim_ + number * kDepth;
      _tile_loadd(4, weights_ + key * kTile, 64);
      _tile_loadd(5, values, 64);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, values + kPacked, 64);
      _tile_dpbf16ps(1, 6, 4);
      if (kTiles > 2) {
        _tile_loadd(7, values + 2 * kPacked, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, values + 3 * kPacked, 64);
        _tile_dpbf16ps(3, 5, 4);
      }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTile * kTile, 64);
    if (kTiles > 2) _tile_stored(2, sums + 2 * kTile * kTile, 64);
    if (kTiles > 2) _tile_stored(3, sums + 3 * kTile * kTile, 64);
  }

  const Item<bf16>& item_;
  const int64_t dim_;
  bf16 *const queries_, *const values_, *const weights_;
  const bf16* keys_[kKeys / kTile];
};

}  // namespace

void attend(const Prompt& p, const Tensors<bf16>& t, int64_t head, int64_t first, int64_t last, void* scratch) {
  attend_tokens<Tiles>(p, t, head, first, last, scratch);
}

}  // namespace equipoise::amx

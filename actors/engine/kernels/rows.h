// What a layer does to each row of hidden states by itself.
#pragma once

#include "numbers.h"

namespace equipoise {

// sum = x + delta, rounded to T; y = norm(sum) * weight + bias.
template <class T>
struct AddNorm {
  const T* x;       // [rows, width]
  const T* delta;   // as x, or null: nothing is added
  const T* weight;  // [width] or null
  const T* bias;    // [width] or null
  T* sum;           // as x; null where nothing is added
  T* y;             // as x
  int64_t width;
  float eps;
  bool rms;  // else the mean is taken off first
};

// Rotary embedding, half-split, of `heads` heads: x may have gaps between rows, y has none.
template <class T>
struct Rotate {
  const T* x;
  T* y;
  const T* cos;  // [rows, head_dim]
  const T* sin;
  int64_t x_stride, heads, head_dim;
};

enum Activation : int { kSilu = 0, kRelu = 1 };

// y [rows, inner] = f(x), or f(gate) * up with x [rows, 2 * inner], gate first.
template <class T>
struct Activate {
  const T* x;
  T* y;
  int64_t inner;
  Activation function;
  bool gated;
};

#define EQUIPOISE_ROWS(set)                                              \
  namespace set {                                                        \
  void add_norm(const AddNorm<float>& a, int64_t first, int64_t last);   \
  void add_norm(const AddNorm<bf16>& a, int64_t first, int64_t last);    \
  void rotate(const Rotate<float>& r, int64_t first, int64_t last);      \
  void rotate(const Rotate<bf16>& r, int64_t first, int64_t last);       \
  void activate(const Activate<float>& a, int64_t first, int64_t last);  \
  void activate(const Activate<bf16>& a, int64_t first, int64_t last);   \
  }
EQUIPOISE_ROWS(avx2)
EQUIPOISE_ROWS(avx512)
#undef EQUIPOISE_ROWS

}  // namespace equipoise

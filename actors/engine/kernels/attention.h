// Attention of decode rows over pages, read where they lie. See `LayerKv` and `StepBatch` for the layout.
#pragma once

#include "numbers.h"

namespace equipoise {

struct Pages {
  const int64_t* page_of;  // [heads, capacity]: page of each logical block of a KV head
  int64_t capacity, block_tokens, head_dim;
};

struct Decode {
  Pages pages;
  const int64_t* blocks;   // [rows, width]
  const int64_t* context;  // [rows] tokens that each row sees, itself included
  int64_t width, heads, group;
  int64_t q_stride;        // numbers between the rows of q
  int64_t window;          // tokens back that a row sees, itself included; 0: all
  float scale;
};

template <class T>
struct Tensors {
  const T* q;      // [rows, heads * group, head_dim]
  const T* pages;  // [num_pages, 2, block_tokens, head_dim]
  T* out;          // as q, contiguous
};

// Bytes of scratch memory, aligned to 64 bytes, for a row of so many tokens.
inline int64_t attention_scratch_bytes(const Decode& d, int64_t context) {
  const int64_t weight_bytes = sizeof(float) + sizeof(bf16), padding = 64;
  return d.group * (context + padding) * weight_bytes + (context / d.pages.block_tokens + 2) * int64_t(sizeof(void*));
}

#define EQUIPOISE_ATTENTION(set)                                                                        \
  namespace set {                                                                                       \
  void attend(const Decode& d, const Tensors<float>& t, int64_t row, int64_t head, void* scratch);      \
  void attend(const Decode& d, const Tensors<bf16>& t, int64_t row, int64_t head, void* scratch);       \
  }
EQUIPOISE_ATTENTION(avx2)
EQUIPOISE_ATTENTION(avx512)
#undef EQUIPOISE_ATTENTION

}  // namespace equipoise

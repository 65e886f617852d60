// Attention of prompt chunks over pages, read where they lie.
//
// Chunks are attended to by items: some tokens of a chunk and one KV head. The tokens' query rows, those of all heads of
// the group, lie side by side as lanes of vectors, so that a softmax takes no sum across a vector, and K and V are read
// once for all of them. Keys are taken by runs of kKeys, which begin at the same tokens of a sequence for every chunk: a
// row's result is the same however its prompt was divided.
#pragma once

#include "attention.h"

namespace equipoise {

// One chunk. The tensors' q and out begin at its first row.
struct Prompt {
  Pages pages;
  const int64_t* blocks;   // of the context
  int64_t rows, context;   // rows of the chunk, and tokens that the last one of them sees
  int64_t heads, group;
  int64_t q_stride;        // numbers between the rows of q
  int64_t window;          // tokens back that a row sees, itself included; 0: all
  float scale;
};

constexpr int64_t kKeys = 128;
constexpr int64_t kLanes = 384;  // of an item, about: their sums stay in the second cache

// Tokens of an item.
inline int64_t item_tokens(const Prompt& p) { return p.group < kLanes ? kLanes / p.group : 1; }

// Bytes of scratch memory, aligned to 64 bytes, for an item.
inline int64_t prompt_scratch_bytes(const Prompt& p) {
  constexpr int64_t kWidest = 16, kParts = 11;
  const int64_t lanes = item_tokens(p) * p.group + kWidest, dim = p.pages.head_dim;
  const int64_t numbers = lanes * (2 * dim + 3) + kKeys * (2 * dim + 2 * kWidest);
  return numbers * int64_t(sizeof(float)) + lanes * 2 * int64_t(sizeof(void*)) + kParts * 64;
}

// Tokens `first` to `last` of a chunk.
#define EQUIPOISE_PROMPTS(set, T) \
  namespace set {                 \
  void attend(const Prompt& p, const Tensors<T>& t, int64_t head, int64_t first, int64_t last, void* scratch); \
  }
EQUIPOISE_PROMPTS(avx2, float)
EQUIPOISE_PROMPTS(avx2, bf16)
EQUIPOISE_PROMPTS(avx512, float)
EQUIPOISE_PROMPTS(avx512, bf16)
EQUIPOISE_PROMPTS(amx, bf16)  // where `tiles_fit`
#undef EQUIPOISE_PROMPTS

inline bool tiles_fit(const Prompt& p) { return p.pages.head_dim % 32 == 0 && p.pages.block_tokens % 16 == 0; }

}  // namespace equipoise

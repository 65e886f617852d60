// Layers of a model over the rows of a step, one after the other, in one call: a layer's ten operations from Python cost as
// much as reading a tenth of its weights. The structs are those of fused_layers.py.
#pragma once

#include "rows.h"

namespace equipoise {

// What all layers of a model share.
struct Shape {
  int64_t hidden, inner, heads, kv_heads, head_dim, block_tokens;
  float eps, scale;
  int rms, pre_norm, gated, function;
};

// Weights, or null where the model has none, and the pages of a layer's KV heads.
struct Layer {
  const bf16 *attention_norm, *attention_norm_bias, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
  const bf16 *mlp_norm, *mlp_norm_bias, *up, *up_bias, *down, *down_bias;
  const int64_t* page_of;  // see Pages
  int64_t capacity, window;
};

// Rows of decodes, each a sequence's last token, and behind them those of prompt chunks.
struct Step {
  bf16* x;             // [rows, hidden]: hidden states; changed
  const bf16* before;  // as x: is added to them before the first layer; or null
  bf16* delta;         // as x: is to be added after the last layer, if norms come first
  const bf16 *cos, *sin;  // [rows, head_dim], or null
  bf16* pages;
  const int64_t *write_blocks, *write_offsets;                // [rows]
  const int64_t *blocks, *context;                            // see Decode
  const int64_t *chunk_blocks, *chunk_rows, *chunk_context;  // see Chunks
  // Rows [sampled] that the last layer goes on with once it has all rows' K and V, or null: all of them. Rising; of
  // decodes any, and of a chunk its last one or none. They come to lie one behind the other in x and delta.
  const int64_t* sampled;
  double* seconds;  // null, or CPU seconds to add to: of products, of attention, of the rest
  int64_t rows, decodes, width, chunks, chunk_width, num_sampled;
};

void run_layers(int set, const Shape& shape, const Layer* layers, int64_t count, const Step& step);

}  // namespace equipoise

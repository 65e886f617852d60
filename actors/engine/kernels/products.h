// Linear products of bfloat16 matrices. Which instruction set is used is decided in entry.cpp; no function
// here may be called on a processor without its instructions.
//
// Weights stay as they are stored, [out, in] with `in` contiguous: layers move between workers as bytes and share one
// arena with the KV pages, so that a second copy in a kernel's own order would cost its memory, and a repack at every
// move. Sums are in float32. The order of adding does not depend on the number of rows, so that a row's result is the
// same in any batch.
#pragma once

#include "numbers.h"

namespace equipoise {

struct Product {
  const bf16* x;       // [rows, in]
  const bf16* weight;  // [out, in]
  const bf16* bias;    // [out] or null
  bf16* y;             // [rows, out]
  int64_t rows, in, out;
};

// Columns of y are computed from `first` to `last`. `first` is a multiple of kColumns, and so is `last` where it isn't
// the end.
constexpr int64_t kColumns = 32;

namespace avx2 {
void product(const Product& p, int64_t first, int64_t last);
}

namespace avx512 {
// Rows are multiplied by tiles of some of them.
int64_t tiles(const Product& p);
// Bytes that `pack` writes.
int64_t packed_bytes(const Product& p);
// The rows of tiles `first` to `last` of x as `product` reads them; `packed` is aligned to 64 bytes.
void pack(const Product& p, void* packed, int64_t first, int64_t last);
void product(const Product& p, const void* packed, int64_t first, int64_t last);
}  // namespace avx512

// `in` must be a multiple of 32 and `out` of 16.
namespace amx {
// Bytes that `pack` writes.
int64_t packed_bytes(const Product& p);
// Rows `first`, a multiple of 16, to `last` of x as `product` reads them; `packed` is aligned to 64 bytes.
void pack(const Product& p, void* packed, int64_t first, int64_t last);
void product(const Product& p, const void* packed, int64_t first, int64_t last);
}  // namespace amx

}  // namespace equipoise

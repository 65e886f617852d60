// bfloat16 pages are multiplied in pairs.
#define EQUIPOISE_PAIRS

#include "attention.h"
#include "exponential.h"
#include "vector_avx512.h"

namespace equipoise::avx512 {
#include "attention.inc"
}  // namespace equipoise::avx512

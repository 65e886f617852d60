#include "attention.h"
#include "exponential.h"
#include "vector_avx512.h"

namespace equipoise::avx512 {
#include "attention.inc"
}  // namespace equipoise::avx512

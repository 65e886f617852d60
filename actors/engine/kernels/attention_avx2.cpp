#include "attention.h"
#include "exponential.h"
#include "vector_avx2.h"

namespace equipoise::avx2 {
#include "attention.inc"
}  // namespace equipoise::avx2

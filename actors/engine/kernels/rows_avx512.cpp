#include "exponential.h"
#include "rows.h"
#include "vector_avx512.h"

namespace equipoise::avx512 {
#include "rows.inc"
}  // namespace equipoise::avx512

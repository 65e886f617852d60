#include "exponential.h"
#include "rows.h"
#include "vector_avx2.h"

namespace equipoise::avx2 {
#include "rows.inc"
}  // namespace equipoise::avx2

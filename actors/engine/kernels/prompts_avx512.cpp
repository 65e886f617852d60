#include "exponential.h"
#include "prompts.h"
#include "vector_avx512.h"

namespace equipoise::avx512 {
#include "prompts.inc"
#include "prompts_plain.inc"
}  // namespace equipoise::avx512

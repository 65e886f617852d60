#include "exponential.h"
#include "prompts.h"
#include "vector_avx2.h"

namespace equipoise::avx2 {
#include "prompts.inc"
#include "prompts_plain.inc"
}  // namespace equipoise::avx2

#include "exponential.h"
#include "prompts.h"
#include "transpose_avx512.h"
#include "vector_avx512.h"
#include "weights_avx512.h"

namespace equipoise::avx512 {
#include "prompts.inc"
#include "prompts_pairs.inc"
#include "prompts_plain.inc"

void attend(const Prompt& p, const Tensors<float>& t, int64_t head, int64_t first, int64_t last, void* scratch) {
  attend_tokens<Plain<float>>(p, t, head, first, last, scratch);
}

void attend(const Prompt& p, const Tensors<bf16>& t, int64_t head, int64_t first, int64_t last, void* scratch) {
  attend_tokens<Pairs>(p, t, head, first, last, scratch);
}
}  // namespace equipoise::avx512

#include "exponential.h"
#include "prompts.h"
#include "vector_avx2.h"

namespace equipoise::avx2 {
#include "prompts.inc"
#include "prompts_plain.inc"

void attend(const Prompt& p, const Tensors<float>& t, int64_t head, int64_t first, int64_t last, void* scratch) {
  attend_tokens<Plain<float>>(p, t, head, first, last, scratch);
}

void attend(const Prompt& p, const Tensors<bf16>& t, int64_t head, int64_t first, int64_t last, void* scratch) {
  attend_tokens<Plain<bf16>>(p, t, head, first, last, scratch);
}
}  // namespace equipoise::avx2

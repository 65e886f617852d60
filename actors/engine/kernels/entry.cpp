// What Python calls: plain C functions over pointers and sizes, which the caller has checked.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "layers.h"
#include "operations.h"

namespace equipoise {
namespace {

// Linux grants a process the tiles' registers when it asks.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool has_amx = (edx >> 24 & 1) && (edx >> 22 & 1);  // AMX-TILE, AMX-BF16
  return has_amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

InstructionSet best_set() {
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bf16");
  if (avx512) return may_use_tiles() ? kAmx : kAvx512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2 : kNone;
}

template <class T>
const T* in(const void* memory) {
  return static_cast<const T*>(memory);
}

template <class T>
T* out(void* memory) {
  return static_cast<T*>(memory);
}

}  // namespace
}  // namespace equipoise

// The functions of kernels/library.py and fused_layers.py. `set` is one that equipoise_instruction_set allows; `half`
// says that numbers are bfloat16 and not float32.
extern "C" {

using namespace equipoise;

// The best instruction set of this processor, or 0 where none fits. Lower ones can be used too.
int equipoise_instruction_set() { return best_set(); }

// y [rows, out] = x [rows, in] times weight [out, in] transposed, plus bias [out] unless it is null; all bfloat16.
void equipoise_product(int set, const void* x, const void* weight, const void* bias, void* y, int64_t rows, int64_t in_,
                       int64_t out_) {
  multiply(set, {in<bf16>(x), in<bf16>(weight), in<bf16>(bias), out<bf16>(y), rows, in_, out_});
}

void equipoise_write(int half, const void* k, const void* v, int64_t k_stride, int64_t v_stride, void* memory,
                     const int64_t* page_of, const int64_t* blocks, const int64_t* offsets, int64_t rows, int64_t heads,
                     int64_t capacity, int64_t block_tokens, int64_t head_dim) {
  const Pages pages{page_of, capacity, block_tokens, head_dim};
  if (half) {
    write(pages, out<bf16>(memory), in<bf16>(k), in<bf16>(v), k_stride, v_stride, blocks, offsets, rows, heads);
  } else {
    write(pages, out<float>(memory), in<float>(k), in<float>(v), k_stride, v_stride, blocks, offsets, rows, heads);
  }
}

void equipoise_attend(int set, int half, const void* q, int64_t q_stride, const void* memory, void* y,
                      const int64_t* page_of, const int64_t* blocks, const int64_t* context, int64_t rows, int64_t width,
                      int64_t heads, int64_t group, int64_t capacity, int64_t block_tokens, int64_t head_dim,
                      int64_t window, float scale) {
  const Decode d{{page_of, capacity, block_tokens, head_dim}, blocks, context, width, heads, group, q_stride, window,
                 scale};
  if (half) {
    attend<bf16>(set, d, {in<bf16>(q), in<bf16>(memory), out<bf16>(y)}, rows);
  } else {
    attend<float>(set, d, {in<float>(q), in<float>(memory), out<float>(y)}, rows);
  }
}

void equipoise_attend_chunks(int set, int half, const void* q, int64_t q_stride, const void* memory, void* y,
                             const int64_t* page_of, const int64_t* blocks, const int64_t* rows, const int64_t* context,
                             int64_t count, int64_t width, int64_t heads, int64_t group, int64_t capacity,
                             int64_t block_tokens, int64_t head_dim, int64_t window, float scale) {
  const Prompt chunk{{page_of, capacity, block_tokens, head_dim}, nullptr, 0, 0, heads, group, q_stride, window, scale};
  const Chunks chunks{blocks, rows, context, count, width};
  if (half) {
    attend_chunks<bf16>(set, chunk, {in<bf16>(q), in<bf16>(memory), out<bf16>(y)}, chunks);
  } else {
    attend_chunks<float>(set, chunk, {in<float>(q), in<float>(memory), out<float>(y)}, chunks);
  }
}

void equipoise_add_norm(int set, int half, const void* x, const void* delta, const void* weight, const void* bias,
                        void* sum, void* y, int64_t rows, int64_t width, float eps, int rms) {
  if (half) {
    add_norm<bf16>(set, {in<bf16>(x), in<bf16>(delta), in<bf16>(weight), in<bf16>(bias), out<bf16>(sum), out<bf16>(y),
                         width, eps, rms != 0}, rows);
  } else {
    add_norm<float>(set, {in<float>(x), in<float>(delta), in<float>(weight), in<float>(bias), out<float>(sum),
                          out<float>(y), width, eps, rms != 0}, rows);
  }
}

void equipoise_rotate(int set, int half, const void* x, int64_t x_stride, const void* cos, const void* sin, void* y,
                      int64_t rows, int64_t heads, int64_t head_dim) {
  if (half) {
    rotate<bf16>(set, {in<bf16>(x), out<bf16>(y), in<bf16>(cos), in<bf16>(sin), x_stride, heads, head_dim}, rows);
  } else {
    rotate<float>(set, {in<float>(x), out<float>(y), in<float>(cos), in<float>(sin), x_stride, heads, head_dim}, rows);
  }
}

void equipoise_activate(int set, int half, const void* x, void* y, int64_t rows, int64_t inner, int function,
                        int gated) {
  if (half) {
    activate<bf16>(set, {in<bf16>(x), out<bf16>(y), inner, Activation(function), gated != 0}, rows);
  } else {
    activate<float>(set, {in<float>(x), out<float>(y), inner, Activation(function), gated != 0}, rows);
  }
}

void equipoise_layers(int set, const Shape* shape, const Layer* layers, int64_t count, const Step* step) {
  run_layers(set, *shape, layers, count, *step);
}
}

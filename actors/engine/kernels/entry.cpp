// What Python calls: plain C functions over pointers and sizes, which the caller has checked. Work is divided over
// torch's threads.
#include <ATen/Parallel.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "attention.h"
#include "products.h"
#include "rows.h"

namespace equipoise {
namespace {

enum InstructionSet : int { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// Below so many multiplications a piece of work is not worth another thread.
constexpr int64_t kGrain = 1 << 19;

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

// Memory of one thread that grows to what was needed most, aligned to a cache line.
void* scratch(int64_t num_bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t size = 0;
  if (size < num_bytes) {
    size = (num_bytes + 63) / 64 * 64;
    memory.reset(std::aligned_alloc(64, size));
  }
  return memory.get();
}

void multiply(int set, const Product& p) {
  const int64_t blocks = (p.out + kColumns - 1) / kColumns;
  const int64_t grain = std::max<int64_t>(1, kGrain / (p.rows * p.in * kColumns + 1));
  const auto by_columns = [&](const auto& work) {
    at::parallel_for(0, blocks, grain, [&](int64_t first, int64_t last) {
      work(first * kColumns, std::min(last * kColumns, p.out));
    });
  };
  if (set == kAmx && p.in % 32 == 0 && p.out % 16 == 0) {
    void* const packed = scratch(amx::packed_bytes(p));
    amx::pack(p, packed);
    by_columns([&](int64_t first, int64_t last) { amx::product(p, packed, first, last); });
  } else if (set >= kAvx512) {
    by_columns([&](int64_t first, int64_t last) { avx512::product(p, first, last); });
  } else {
    by_columns([&](int64_t first, int64_t last) { avx2::product(p, first, last); });
  }
}

// Writes the rows' K and V, each [rows, heads, head_dim] with gaps between rows, to their pages.
template <class T>
void write(const Pages& pages, T* memory, const T* k, const T* v, int64_t k_stride, int64_t v_stride,
           const int64_t* blocks, const int64_t* offsets, int64_t rows, int64_t heads) {
  const int64_t dim = pages.head_dim, num_bytes = dim * int64_t(sizeof(T));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t page = pages.page_of[head * pages.capacity + blocks[row]];
      T* const target = memory + (page * 2 * pages.block_tokens + offsets[row]) * dim;
      std::memcpy(target, k + row * k_stride + head * dim, num_bytes);
      std::memcpy(target + pages.block_tokens * dim, v + row * v_stride + head * dim, num_bytes);
    }
  }
}

template <class T>
void attend(int set, const Decode& d, const Tensors<T>& t, int64_t rows) {
  if (rows == 0 || d.heads == 0) return;
  const int64_t longest = *std::max_element(d.context, d.context + rows);
  const int64_t num_bytes = attention_scratch_bytes(d, longest);
  const int64_t grain = std::max<int64_t>(1, kGrain / (longest * d.group * d.pages.head_dim * 2 + 1));
  at::parallel_for(0, rows * d.heads, grain, [&](int64_t first, int64_t last) {
    void* const memory = scratch(num_bytes);
    for (int64_t i = first; i < last; ++i) {
      if (set >= kAvx512) {
        avx512::attend(d, t, i / d.heads, i % d.heads, memory);
      } else {
        avx2::attend(d, t, i / d.heads, i % d.heads, memory);
      }
    }
  });
}

// work(first, last) over rows, each of which takes about `cost` operations.
template <class Work>
void by_rows(int64_t rows, int64_t cost, const Work& work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / (cost + 1)), work);
}

template <class T>
void add_norm(int set, const AddNorm<T>& a, int64_t rows) {
  by_rows(rows, 8 * a.width, [&](int64_t first, int64_t last) {
    set >= kAvx512 ? avx512::add_norm(a, first, last) : avx2::add_norm(a, first, last);
  });
}

template <class T>
void rotate(int set, const Rotate<T>& r, int64_t rows) {
  by_rows(rows, 4 * r.heads * r.head_dim, [&](int64_t first, int64_t last) {
    set >= kAvx512 ? avx512::rotate(r, first, last) : avx2::rotate(r, first, last);
  });
}

template <class T>
void activate(int set, const Activate<T>& a, int64_t rows) {
  by_rows(rows, 16 * a.inner, [&](int64_t first, int64_t last) {
    set >= kAvx512 ? avx512::activate(a, first, last) : avx2::activate(a, first, last);
  });
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

// The functions of kernels/library.py. `set` is one that equipoise_instruction_set allows; `half` says that numbers are
// bfloat16 and not float32.
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
}

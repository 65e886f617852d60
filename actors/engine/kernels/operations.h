// Operations over rows: by the instruction set that is asked for, and divided over as many threads as torch has.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "products.h"
#include "prompts.h"
#include "rows.h"
#include "team.h"

namespace equipoise {

enum InstructionSet : int { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// Below so many multiplications a piece of work is not worth another thread.
constexpr int64_t kGrain = 1 << 16;

// Memory that grows to what was needed most, aligned to a cache line.
class Scratch {
 public:
  void* at_least(int64_t num_bytes) {
    if (size_ < num_bytes) {
      size_ = (num_bytes + 63) / 64 * 64;
      memory_.reset(std::aligned_alloc(64, size_));
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

// Of one thread, for what one operation needs.
inline void* scratch(int64_t num_bytes) {
  thread_local Scratch memory;
  return memory.at_least(num_bytes);
}

inline void multiply(int set, const Product& p) {
  const int64_t blocks = (p.out + kColumns - 1) / kColumns;
  const int64_t grain = std::max<int64_t>(1, kGrain / (p.rows * p.in * kColumns + 1));
  // A step of few rows reads the weight from memory, best in long pieces; one of many waits longer for the last piece.
  const int64_t pieces = p.rows < 64 ? 4 : 16;
  const auto by_columns = [&](const auto& work) {
    divide(blocks, grain, [&](int64_t first, int64_t last) {
      work(first * kColumns, std::min(last * kColumns, p.out));
    }, pieces);
  };
  if (set == kAmx && p.in % 32 == 0 && p.out % 16 == 0) {
    void* const packed = scratch(amx::packed_bytes(p));
    constexpr int64_t kRows = 16;
    divide((p.rows + kRows - 1) / kRows, std::max<int64_t>(1, kGrain / (kRows * p.in)),
           [&](int64_t first, int64_t last) {
             amx::pack(p, packed, first * kRows, std::min(last * kRows, p.rows));
           });
    by_columns([&](int64_t first, int64_t last) { amx::product(p, packed, first, last); });
  } else if (set >= kAvx512) {
    void* const packed = scratch(avx512::packed_bytes(p));
    divide(avx512::tiles(p), std::max<int64_t>(1, kGrain / (8 * p.in)),
           [&](int64_t first, int64_t last) { avx512::pack(p, packed, first, last); });
    by_columns([&](int64_t first, int64_t last) { avx512::product(p, packed, first, last); });
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
  divide(rows * d.heads, grain, [&](int64_t first, int64_t last) {
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

// The prompt chunks of a step, P of them, whose rows lie behind each other.
struct Chunks {
  const int64_t* blocks;   // [P, width]
  const int64_t* rows;     // [P]
  const int64_t* context;  // [P] tokens that the chunk's last row sees
  int64_t count, width;
};

inline void attend_item(int set, const Prompt& p, const Tensors<float>& t, int64_t head, int64_t first, int64_t last,
                        void* memory) {
  set >= kAvx512 ? avx512::attend(p, t, head, first, last, memory) : avx2::attend(p, t, head, first, last, memory);
}

inline void attend_item(int set, const Prompt& p, const Tensors<bf16>& t, int64_t head, int64_t first, int64_t last,
                        void* memory) {
  if (set == kAmx && tiles_fit(p)) return amx::attend(p, t, head, first, last, memory);
  set >= kAvx512 ? avx512::attend(p, t, head, first, last, memory) : avx2::attend(p, t, head, first, last, memory);
}

// `chunk` has what all chunks share; q and out of `t` begin at the first one's first row.
template <class T>
void attend_chunks(int set, Prompt chunk, Tensors<T> t, const Chunks& chunks) {
  struct Piece {
    Prompt chunk;
    Tensors<T> tensors;
    int64_t head, first, last;
  };
  std::vector<Piece> pieces;
  const int64_t tokens = item_tokens(chunk);
  for (int64_t c = 0; c < chunks.count; ++c) {
    chunk.blocks = chunks.blocks + c * chunks.width;
    chunk.rows = chunks.rows[c];
    chunk.context = chunks.context[c];
    // The last rows, which see most, first: threads then end at about the same time.
    for (int64_t first = (chunk.rows - 1) / tokens * tokens; first >= 0; first -= tokens) {
      for (int64_t head = 0; head < chunk.heads; ++head) {
        pieces.push_back({chunk, t, head, first, std::min(first + tokens, chunk.rows)});
      }
    }
    t.q += chunk.rows * chunk.q_stride;
    t.out += chunk.rows * chunk.heads * chunk.group * chunk.pages.head_dim;
  }
  const int64_t num_bytes = prompt_scratch_bytes(chunk), count = int64_t(pieces.size());
  const auto attend_pieces = [&](int64_t first, int64_t last) {
    void* const memory = scratch(num_bytes);
    for (int64_t i = first; i < last; ++i) {
      const Piece& piece = pieces[i];
      attend_item(set, piece.chunk, piece.tensors, piece.head, piece.first, piece.last, memory);
    }
  };
  divide(count, 1, attend_pieces, count);  // one by one: they differ much
}

// work(first, last) over rows, each of which takes about `cost` operations.
template <class Work>
void by_rows(int64_t rows, int64_t cost, const Work& work) {
  divide(rows, std::max<int64_t>(1, kGrain / (cost + 1)), work);
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

}  // namespace equipoise

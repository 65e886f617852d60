// See layers.h.
#include "layers.h"

#include <time.h>

#include <cstring>

#include "operations.h"

namespace equipoise {
namespace {

enum Part : int { kProducts, kAttention, kRows };

// Adds this thread's time in a scope to that of a part, if somebody wants to know.
class Timed {
 public:
  Timed(double* seconds, Part part) : seconds_(seconds ? seconds + part : nullptr) {
    if (seconds_) *seconds_ -= now_s();
  }
  ~Timed() {
    if (seconds_) *seconds_ += now_s();
  }

 private:
  static double now_s() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  }

  double* const seconds_;
};

class Run {
 public:
  Run(int set, const Shape& shape, const Step& step) : set_(set), shape_(shape), step_(step), rows_(step.rows) {
    thread_local Scratch memory;
    const int64_t widths[] = {shape.hidden, shape.hidden, qkv_heads() * shape.head_dim, qk_heads() * shape.head_dim,
                              shape.heads * shape.head_dim, shape.inner * (shape.gated ? 2 : 1), shape.inner};
    bf16** const buffers[] = {&normed_, &sum_, &qkv_, &rotated_, &attended_, &up_, &active_};
    int64_t total = 0;
    for (const int64_t width : widths) total += width;
    bf16* next = static_cast<bf16*>(memory.at_least(total * step.rows * int64_t(sizeof(bf16))));
    for (int i = 0; i < 7; ++i) {
      *buffers[i] = next;
      next += widths[i] * step.rows;
    }
  }

  // From the next layer's K and V on, only rows that are sampled from.
  void leave_out_others() { leaves_out_ = true; }

  // Norms first: x and `delta` are the layer's input, and x and step.delta its output.
  void pre_norm(const Layer& l, const bf16* delta) {
    norm(delta, step_.x, normed_, l.attention_norm, l.attention_norm_bias);
    attention(l, normed_);
    norm(step_.delta, step_.x, normed_, l.mlp_norm, l.mlp_norm_bias);
    mlp(l, normed_);
  }

  // Norms last: x is input and output.
  void post_norm(const Layer& l) {
    attention(l, step_.x);
    norm(step_.delta, sum_, step_.x, l.attention_norm, l.attention_norm_bias);
    mlp(l, step_.x);
    norm(step_.delta, sum_, step_.x, l.mlp_norm, l.mlp_norm_bias);
  }

 private:
  int64_t qk_heads() const { return shape_.heads + shape_.kv_heads; }
  int64_t qkv_heads() const { return qk_heads() + shape_.kv_heads; }

  // sum = x + delta, unless that is null, and y = norm(sum)
  void norm(const bf16* delta, bf16* sum, bf16* y, const bf16* weight, const bf16* bias) {
    const Timed timed(step_.seconds, kRows);
    add_norm<bf16>(set_, {step_.x, delta, weight, bias, sum, y, shape_.hidden, shape_.eps, shape_.rms != 0}, rows_);
  }

  void linear(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t in, int64_t out) {
    const Timed timed(step_.seconds, kProducts);
    multiply(set_, {x, weight, bias, y, rows_, in, out});
  }

  // Each of some heads of the rows of q, k and v by itself, in place.
  void norm_heads(bf16* first, int64_t heads, const bf16* weight) {
    const int64_t width = shape_.head_dim;
    for (int64_t row = 0; row < rows_; ++row, first += qkv_heads() * width) {
      add_norm<bf16>(set_, {first, nullptr, weight, nullptr, nullptr, first, width, shape_.eps, true}, heads);
    }
  }

  // step.delta = attention(x)
  void attention(const Layer& l, const bf16* x) {
    const int64_t dim = shape_.head_dim, width = shape_.heads * dim;
    linear(x, l.qkv, l.qkv_bias, qkv_, shape_.hidden, qkv_heads() * dim);
    bf16* qk = qkv_;
    int64_t qk_stride = qkv_heads() * dim;
    {
      const Timed timed(step_.seconds, kRows);
      if (l.q_norm) norm_heads(qkv_, shape_.heads, l.q_norm);
      if (l.k_norm) norm_heads(qkv_ + width, shape_.kv_heads, l.k_norm);
      if (step_.cos) {
        rotate<bf16>(set_, {qkv_, rotated_, step_.cos, step_.sin, qk_stride, qk_heads(), dim}, rows_);
        qk = rotated_;
        qk_stride = qk_heads() * dim;
      }
    }
    {
      const Timed timed(step_.seconds, kAttention);
      const Pages pages{l.page_of, l.capacity, shape_.block_tokens, dim};
      write(pages, step_.pages, qk + width, qkv_ + qk_heads() * dim, qk_stride, qkv_heads() * dim, step_.write_blocks,
            step_.write_offsets, rows_, shape_.kv_heads);
      const int64_t group = shape_.heads / shape_.kv_heads, decodes = step_.decodes;
      const Decode decode{pages, step_.blocks, step_.context, step_.width, shape_.kv_heads,
                          group, qk_stride, l.window, shape_.scale};
      attend<bf16>(set_, decode, {qk, step_.pages, attended_}, decodes);
      const Prompt chunk{pages, nullptr, 0, 0, shape_.kv_heads, group, qk_stride, l.window, shape_.scale};
      if (leaves_out_) {
        keep_sampled(chunk, qk);
      } else {
        attend_chunks<bf16>(set_, chunk, {qk + decodes * qk_stride, step_.pages, attended_ + decodes * width},
                            {step_.chunk_blocks, step_.chunk_rows, step_.chunk_context, step_.chunks, step_.chunk_width});
      }
    }
    linear(attended_, l.o, l.o_bias, step_.delta, width, shape_.hidden);
  }

  // Brings what is sampled from together, once decodes have attended: of these, all but a longer prompt's first token, and
  // the last row of chunks, which attends here.
  void keep_sampled(const Prompt& chunk, bf16* qk) {
    const int64_t width = shape_.heads * shape_.head_dim, one = 1;
    const auto move = [](bf16* first, int64_t stride, int64_t numbers, int64_t from, int64_t to) {
      std::memmove(first + to * stride, first + from * stride, numbers * sizeof(bf16));
    };
    for (rows_ = 0; rows_ < step_.num_sampled && step_.sampled[rows_] < step_.decodes; ++rows_) {
      move(step_.x, shape_.hidden, shape_.hidden, step_.sampled[rows_], rows_);
      move(attended_, width, width, step_.sampled[rows_], rows_);
    }
    int64_t last = step_.decodes - 1;
    for (int64_t c = 0; c < step_.chunks && rows_ < step_.num_sampled; ++c) {
      last += step_.chunk_rows[c];
      if (step_.sampled[rows_] != last) continue;
      move(step_.x, shape_.hidden, shape_.hidden, last, rows_);
      move(qk, chunk.q_stride, width, last, rows_);
      const bf16* const q = qk + rows_ * chunk.q_stride;
      attend_chunks<bf16>(set_, chunk, {q, step_.pages, attended_ + rows_ * width},
                          {step_.chunk_blocks + c * step_.chunk_width, &one, step_.chunk_context + c, 1, step_.chunk_width});
      ++rows_;
    }
  }

  // step.delta = mlp(x)
  void mlp(const Layer& l, const bf16* x) {
    linear(x, l.up, l.up_bias, up_, shape_.hidden, shape_.inner * (shape_.gated ? 2 : 1));
    {
      const Timed timed(step_.seconds, kRows);
      activate<bf16>(set_, {up_, active_, shape_.inner, Activation(shape_.function), shape_.gated != 0}, rows_);
    }
    linear(active_, l.down, l.down_bias, step_.delta, shape_.inner, shape_.hidden);
  }

  const int set_;
  const Shape& shape_;
  const Step& step_;
  int64_t rows_;
  bool leaves_out_ = false;
  bf16 *normed_, *sum_, *qkv_, *rotated_, *attended_, *up_, *active_;  // each [rows, its width]
};

}  // namespace

void run_layers(int set, const Shape& shape, const Layer* layers, int64_t count, const Step& step) {
  Run run(set, shape, step);
  for (int64_t i = 0; i < count; ++i) {
    if (step.sampled && i == count - 1) run.leave_out_others();
    if (shape.pre_norm) {
      run.pre_norm(layers[i], i ? step.delta : step.before);
    } else {
      run.post_norm(layers[i]);
    }
  }
}

}  // namespace equipoise

// The kernel contract: memory and every operation the model needs. Layers above see this file alone; kernels/cpu
// implements it. A wrong shape or dtype is a thrown sentence in every build.
//
// Notation: n tokens, C n_embd, V rows of a (local) vocabulary, h heads, d head size. "activation" is float32 or
// bfloat16, the same for all activation arguments of one call. Vectors of parameters and positions are float32.
// "stream" is the residual stream or its gradient: always float32, since every block adds to it and what rounding it
// would lose adds up over the depth. Arithmetic is float32; a bfloat16 output is rounded once, when it is stored.
// Gradients of weights are float32. The order of every sum is fixed: it depends on shapes, never on the number of
// threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/philox.h"
#include "kernels/tensor.h"

namespace onescale {

// Whether a gradient is written for the first time in a step or added to.
enum class Write : std::uint8_t { overwrite, accumulate };

enum class Gelu : std::uint8_t { tanh, erf };

// For each query of attention the first and the last key that it sees: int32 [B, n_q] each, keys counted from 0. The
// causal sequence, a shard of it, zigzag chunks, documents and cached decoding are all expressed by it. last < first:
// it sees none and o is 0.
struct Visible {
  Tensor first, last;
};

// What identifies the elements of one dropout call. p = 0 turns it off. Kept elements are scaled by 1/(1-p).
// Element (b, t, e) of a [B, T, ...] activation is keyed by row first_row + b, position positions[b, t] and its
// feature, or (in attention) its head first_head + head and its key.
struct Dropout {
  float p = 0;
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t layer = 0;
  Site site = Site::embedding;
  std::int64_t first_row = 0;
  std::int64_t first_head = 0;
  Tensor positions;  // int32 [B, T]
};

// The settings of one AdamW update (Loshchilov and Hutter 2019), with decay decoupled: w -= lr * (m_hat / (sqrt(v_hat)
// + eps) + decay * w).
struct AdamW {
  float lr, beta1, beta2, eps, weight_decay;
  std::int64_t count;    // updates so far including this one, for the bias corrections
  float gradient_scale;  // every gradient is multiplied by it first: the clip coefficient
};

// What memory is for; the unit of the table that is printed before step 0.
// transient: gathered weights, gradients before their reduction, and what travels between ranks.
enum class Kind : std::uint8_t {
  parameters,
  gradients,
  optimizer,
  activations,
  workspace,
  kernel_scratch,
  batches,
  transient
};
inline constexpr int kind_count = 8;
const char* name_of(Kind kind);

// One operation that ran: start and end in seconds of the steady clock, arithmetic and memory traffic.
struct Operation {
  const char* name;
  double begin, end, flops, bytes;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string describe() const = 0;

  // Memory, zeroed, aligned to 64 bytes, owned by the device until it is destroyed. Throws when there is none.
  virtual Tensor allocate(Kind kind, DType dtype, std::initializer_list<std::int64_t> shape) = 0;
  // Bytes allocated so far by kind; kernel_scratch: the most that one operation has asked for.
  virtual std::array<std::int64_t, kind_count> memory() const = 0;
  // Takes the scratch that a dry run found; from then on an operation that asks for more throws. Without this call
  // scratch grows as needed.
  virtual void reserve_scratch(std::int64_t bytes) = 0;

  virtual void upload(Tensor dst, const void* src) = 0;  // dst contiguous
  virtual void download(void* dst, Tensor src) = 0;      // src contiguous; waits for the operations before it
  // Called by the host after each operation, so that transfers between ranks go on while it computes.
  virtual void after_each(std::function<void()> hook) = 0;
  // Called with each operation, after it; empty ends it.
  virtual void trace(std::function<void(const Operation&)> event) = 0;
  // Best floating-point rate, of products of this activation type, and memory rate that a short loop reaches here, in
  // FLOP/s and byte/s, measured at the call.
  virtual double peak_flops(DType dtype) = 0;
  virtual double peak_bandwidth() = 0;

  // dst = value everywhere. float32, bfloat16 or float64, contiguous.
  virtual void fill(Tensor dst, float value) = 0;
  // dst = src, float32 and bfloat16 converted; same shape, any strides.
  virtual void copy(Tensor dst, Tensor src) = 0;
  // dst[i] = stddev * z(first + i), z standard normal keyed by (seed, tensor, index): Box-Muller on Philox. float32,
  // contiguous.
  virtual void random_normal(Tensor dst, std::uint64_t seed, std::int64_t tensor, std::int64_t first, float stddev) = 0;

  // out[i] = table[index[i] - first_row]; zero where that row is not in the table. out [n, C] stream, table [V, C]
  // activation or stream, index int32 [n]. A token embedding, or the choice of the tokens that the head computes.
  virtual void gather_rows(Tensor out, Tensor table, Tensor index, std::int64_t first_row) = 0;
  // dtable[r] (+)= sum over i with index[i] - first_row == r of dout[i], in the order of i. dout stream [n, C], dtable
  // float32 [V, C] (overwrite zeroes it first).
  virtual void gather_rows_backward(Tensor dtable, Tensor dout, Tensor index, std::int64_t first_row, Write write) = 0;
  // out[index[i]] = rows[i], zero in all other rows; index holds no row twice. out [n, C], rows [k, C] stream, index
  // int32 [k].
  virtual void scatter_rows(Tensor out, Tensor rows, Tensor index) = 0;

  // x = drop(x + wpe[positions]) in place. x [B, T, C] stream, positions int32 [B, T], wpe float32 [P, C].
  virtual void add_positions(Tensor x, Tensor positions, Tensor wpe, const Dropout& dropout) = 0;
  // x = drop(x) in place, x [B, T, C] stream: the gradient of a dropout is its mask.
  virtual void dropout(Tensor x, const Dropout& dropout) = 0;

  // Layer normalisation (Ba et al. 2016): y = (x - mean) * rstd * w + b, rstd = 1/sqrt(var + eps), statistics over the
  // last axis. x stream, y activation [..., C]; mean, rstd float32, one a token, overwritten; w, b float32 [C].
  virtual void layernorm(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps) = 0;
  // dx (stream) += the gradient through the normalisation of x (stream); dy activation; w, dw, db float32 [C];
  // dw, db (+)=.
  virtual void layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                  Tensor w, Write write) = 0;

  // out = x + drop(y + bias), and y_norm = layernorm(out) in the same pass. All [B, T, C]; out, x stream, out may be x;
  // y, y_norm activations; bias, w, b float32 [C].
  virtual void residual_layernorm(Tensor out, Tensor y_norm, Tensor mean, Tensor rstd, Tensor x, Tensor y, Tensor bias,
                                  Tensor w, Tensor b, float eps, const Dropout& dropout) = 0;
  // out = x + drop(y + bias); out may be x.
  virtual void residual(Tensor out, Tensor x, Tensor y, Tensor bias, const Dropout& dropout) = 0;
  // dy (activation) = drop'(dout), dout stream; dbias float32 [C] (+)= its sum over tokens. The gradient of x is dout
  // itself.
  virtual void residual_backward(Tensor dy, Tensor dbias, Tensor dout, const Dropout& dropout, Write write) = 0;

  // y = x W^T + b. x [n, in], W [out, in] activations, b float32 [out] or empty; y [n, out] activation, overwritten.
  virtual void linear(Tensor y, Tensor x, Tensor W, Tensor b) = 0;
  // dx [n, in] is overwritten; dW [out, in] and db [out] (skipped when empty) float32: dW (+)= dy^T x, db (+)= sum_n
  // dy.
  virtual void linear_backward(Tensor dx, Tensor dW, Tensor db, Tensor dy, Tensor x, Tensor W, Write write) = 0;

  // y = gelu(x) (Hendrycks and Gimpel 2016), contiguous activations of one shape.
  virtual void gelu(Tensor y, Tensor x, Gelu kind) = 0;
  // dy becomes dx in place: dy *= gelu'(x); dbias float32 [last axis] (+)= the sum of dx over all other axes.
  virtual void gelu_backward(Tensor dy, Tensor dbias, Tensor x, Gelu kind, Write write) = 0;

  // Attention with an online softmax (Rabe and Staats 2021; Dao 2022): memory grows with n_q + n_k, never with their
  // product. q [B, n_q, h, d]; k, v [B, n_k, h_kv, d] with h_kv 1 or h, last axis contiguous, any other strides; o [B,
  // n_q, h, d] overwritten; lse [B, n_q, h] float32, the logarithm of the softmax denominator, kept for the backward
  // pass. Dropout acts on the probabilities.
  virtual void attention(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, float scale, const Visible& visible,
                         const Dropout& dropout) = 0;
  // dq, dk, dv are overwritten; with one K/V head they hold the sum over all query heads. o, do_ as q.
  virtual void attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor do_, Tensor o, Tensor lse, Tensor q, Tensor k,
                                  Tensor v, float scale, const Visible& visible, const Dropout& dropout) = 0;

  // The parts of a softmax over a vocabulary of which this tensor may hold a shard: stats float32 [n, 3] = max_v
  // logits, sum_v exp(logits - max), and the label's logit (0 where labels[i] - first_row is not among the `rows` first
  // columns). logits activation [n, V]; columns from `rows` on are padding and take part in nothing. labels int32 [n],
  // none ignored.
  virtual void softmax_statistics(Tensor stats, Tensor logits, Tensor labels, std::int64_t first_row,
                                  std::int64_t rows) = 0;
  // loss[i] = log(sum) + max - label's logit, float32 [n], from the statistics of the whole vocabulary; logits become
  // their gradient in place: (softmax - onehot) * weight, 0 in the padding. Skips the gradient when weight is 0.
  virtual void cross_entropy(Tensor loss, Tensor logits, Tensor stats, Tensor labels, std::int64_t first_row,
                             std::int64_t rows, float weight) = 0;

  // The statistics of the whole vocabulary from those of its shards: stats float32 [n, 3], parts float32 [shards, n,
  // 3], combined in the order of the shards.
  virtual void combine_statistics(Tensor stats, Tensor parts) = 0;

  // out (+)= pieces[0] + pieces[1] + ..., added in float32 in that order and rounded once. All contiguous and of one
  // size; the pieces float32 or bfloat16, out float32 or of their dtype; out may be one of them.
  virtual void sum_pieces(Tensor out, const std::vector<Tensor>& pieces, Write write) = 0;
  // out float64 [1] (+)= sum of x (float32), or of its squares, added in float64 in a fixed order.
  virtual void sum(Tensor out, Tensor x, Write write) = 0;
  virtual void sum_of_squares(Tensor out, Tensor x, Write write) = 0;

  // One update of a flat stretch of float32 weights w with moments m, v and gradient g; when `compute` is a bfloat16
  // tensor it receives the rounded weights in the same pass.
  virtual void adamw(Tensor w, Tensor m, Tensor v, Tensor g, Tensor compute, const AdamW& settings) = 0;
  // w -= lr * (scale * g + decay * w); compute as above.
  virtual void sgd(Tensor w, Tensor g, Tensor compute, float lr, float weight_decay, float scale) = 0;
};

// CPUs that the process may use.
int available_threads();

// The instruction levels that kernels/cpu is compiled for and this processor has, the widest last: "v3" (x86-64-v3:
// AVX2, FMA), "v4" (x86-64-v4: AVX-512).
std::vector<std::string> cpu_levels();

// The CPU device. threads 0: all that the process may use. isa: one of cpu_levels(), or "auto", the widest. A dry one
// computes nothing and owns no memory: allocate() counts, every operation checks its arguments and notes the scratch it
// would need. The code of a step, run on it, is the plan of that step.
std::unique_ptr<Device> make_cpu_device(int threads, bool dry, const std::string& isa = "auto");

}  // namespace onescale

// Sums over tokens, one a column: the gradients of biases and of normalisation weights.
#pragma once

#include <algorithm>

#include "kernels/cpu/vec.h"
#include "kernels/device.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// Tokens are added in blocks of this many, each from zero; the blocks' sums are then added in order.
inline constexpr std::int64_t sum_block = 32;

// out float32 [C] (+)= the sum over n rows of x, rows `stride` elements apart. The same bits for any number of threads.
template <class T>
void column_sum(float* out, const T* x, std::int64_t n, std::int64_t C, std::int64_t stride, Write write, int threads);

extern template void column_sum(float*, const float*, std::int64_t, std::int64_t, std::int64_t, Write, int);
extern template void column_sum(float*, const bf16*, std::int64_t, std::int64_t, std::int64_t, Write, int);

// For an operation that sums while it computes: body(row, sum) for n rows adds to sum, float32 [columns]; the columns
// are those of the tensors `out`, which then (+)= their sums. `partial` is scratch of sum_bytes().
inline std::int64_t sum_bytes(std::int64_t n, std::int64_t columns) {
  return (n + sum_block - 1) / sum_block * columns * size_of(DType::float32);
}
template <class Body>
void sum_rows(std::initializer_list<Tensor> out, std::int64_t n, float* partial, Write write, int threads, Body body) {
  std::int64_t columns = 0;
  for (const Tensor& t : out) columns += t.numel();
  const std::int64_t blocks = (n + sum_block - 1) / sum_block;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(body)
  for (std::int64_t block = 0; block < blocks; ++block) {
    float* const sum = partial + block * columns;
    std::fill_n(sum, columns, 0.0f);
    for (std::int64_t row = block * sum_block; row < std::min(n, (block + 1) * sum_block); ++row) body(row, sum);
  }
  for (const Tensor& t : out) {
    column_sum(t.as<float>(), partial, blocks, t.numel(), columns, write, threads);
    partial += t.numel();
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

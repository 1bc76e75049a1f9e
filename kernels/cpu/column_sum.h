// Sums over tokens, one a column: the gradients of biases and of normalisation weights.
#pragma once

#include "kernels/cpu/vec.h"
#include "kernels/device.h"

namespace onescale::cpu {

// Tokens are added in blocks of this many, each from zero; the blocks' sums are then added in order. An operation that
// sums while it computes leaves one row of partial sums a block in scratch and gives them to column_sum(); it writes
// blocks in parallel.
inline constexpr std::int64_t sum_block = 32;
inline std::int64_t sum_blocks(std::int64_t n) {
  return (n + sum_block - 1) / sum_block;
}

// out float32 [C] (+)= the sum over n rows of x, rows `stride` elements apart. The same bits for any number of threads.
template <class T>
void column_sum(float* out, const T* x, std::int64_t n, std::int64_t C, std::int64_t stride, Write write, int threads);

extern template void column_sum(float*, const float*, std::int64_t, std::int64_t, std::int64_t, Write, int);
extern template void column_sum(float*, const bf16*, std::int64_t, std::int64_t, std::int64_t, Write, int);

}  // namespace onescale::cpu

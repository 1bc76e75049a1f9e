// Matrix products by our own blocked loops (Goto and van de Geijn 2008): both operands are packed into panels, and a
// tile of the result is summed in registers. An element's sum runs over k in order, cut at the same places whatever M,
// N and the number of threads are: the same bits for any of them.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// A matrix as a product reads it: element (i, k) is data[i * row + k * step]; one of the two strides is 1.
struct Operand {
  const void* data;
  std::int64_t row, step;
};

// c [M, N] = a [M, K] b [N, K]^T. a, b (and a bias) are of `input` type; c is contiguous, float32 or of `input` type.
struct Product {
  std::int64_t M, N, K;
  Operand a, b;
  DType input, output;
  int threads;

  std::int64_t scratch_bytes() const;  // whatever the operands' data, which may be null
  // c is overwritten, or added to when `accumulate` (float32 only); bias [N] is added to every row unless null, K
  // is 0 or c is added to.
  void run(void* c, const void* bias, bool accumulate, char* scratch) const;
};

}  // namespace onescale::cpu::inline ONESCALE_ISA

// Matrix products by our own blocked loops (Goto and van de Geijn 2008): both operands are packed into panels, and a
// tile of the result is summed in registers. An element's sum is cut at the same places whatever M, N and the number of
// threads are: the same bits for any of them. It runs over k in order but where pairs of bfloat16 are multiplied.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// A matrix as a product reads it: element (i, k) is data[i * row + k * step]; one of the two strides is 1.
struct Operand {
  const void* data;
  std::int64_t row, step;
};

// How products of bfloat16 are computed: converted to float32, or by instructions that multiply pairs of them and add
// to float32 sums, vdpbf16ps on vectors (AVX512_BF16) or tdpbf16ps on tiles (AMX). The last two flush denormal numbers
// to zero and add in an order of their own, so that the bits of the three differ.
enum class Bf16 : std::uint8_t { converted, vectors, tiles };
// The fastest that this processor and system have. Asks the system for the use of tiles.
Bf16 fastest_bf16();
// Multiplies pairs in registers alone, for less than 1 ms, and returns how many FLOPs that was.
double multiply_pairs(Bf16 by);

// c [M, N] = a [M, K] b [N, K]^T. a, b are of `input` type; c is contiguous, float32 or of `input` type.
struct Product {
  std::int64_t M, N, K;
  Operand a, b;
  DType input, output;
  int threads;
  Bf16 bf16 = Bf16::converted;

  std::int64_t scratch_bytes() const;  // whatever the operands' data, which may be null
  // c is overwritten, or added to when `accumulate` (float32 only); bias [N] is added to every row unless null, K
  // is 0 or c is added to.
  void run(void* c, const float* bias, bool accumulate, char* scratch) const;

 private:
  bool by_pairs() const { return input == DType::bfloat16 && bf16 != Bf16::converted; }
  std::int64_t pairs_scratch_bytes() const;
  void run_pairs(void* c, const float* bias, bool accumulate, char* scratch) const;
};

// How threads share a product: parts that each packs for itself. They need not wait for each other, and cores that
// share no cache do not exchange panels.
struct Parts {
  std::int64_t rows, columns, across, count;
  bool whole_a() const { return rows <= columns; }  // whether a is packed whole, and b in groups of panels
  // packing: what packing an element of a or b costs, in terms of its sums. Columns, and rows where there are several
  // parts of them, are cut at multiples of `multiple`.
  Parts(const Product& product, std::int64_t packing_a, std::int64_t packing_b, std::int64_t multiple);
};

}  // namespace onescale::cpu::inline ONESCALE_ISA

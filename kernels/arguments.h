// Checks of an operation's arguments; every backend begins its operations with them. Each failure is a sentence that
// names the operation, the argument, what it is and what it should be.
#pragma once

#include "kernels/error.h"
#include "kernels/tensor.h"

namespace onescale {

// `t` is contiguous and has this dtype and shape.
void expect(const char* operation, const char* argument, const Tensor& t, DType dtype,
            std::initializer_list<std::int64_t> shape);
// `t` is contiguous and has the dtype and shape of `other`.
void expect_like(const char* operation, const char* argument, const Tensor& t, const Tensor& other);
// `t` is contiguous, has this dtype and `count` elements in any shape.
void expect_count(const char* operation, const char* argument, const Tensor& t, DType dtype, std::int64_t count);
// `t` is a contiguous float32 or bfloat16 tensor of at least `rank` axes.
void expect_activation(const char* operation, const char* argument, const Tensor& t, int rank = 1);

// Number of rows of the last axis.
inline std::int64_t rows_of(const Tensor& t) {
  return t.dim(-1) ? t.numel() / t.dim(-1) : 0;
}

}  // namespace onescale

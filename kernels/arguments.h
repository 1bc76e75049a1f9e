// Checks of an operation's arguments; every backend begins its operations with them. Each failure is a sentence that
// names the operation, the argument, what it is and what it should be.
#pragma once

#include "kernels/error.h"
#include "kernels/tensor.h"

namespace onescale {

// An argument and what it must be: like another tensor, of a dtype and shape, or of a dtype and a number of elements
// or of rows of the last axis.
struct Argument {
  const char* name;
  const Tensor& given;
  Tensor wanted;
  bool any_shape = false;

  Argument(const char* name, const Tensor& given, const Tensor& like) : name(name), given(given), wanted(like) {}
  Argument(const char* name, const Tensor& given, DType dtype, std::initializer_list<std::int64_t> shape)
      : name(name), given(given), wanted(nullptr, dtype, shape) {}
  Argument(const char* name, const Tensor& given, DType dtype, std::int64_t count)
      : name(name), given(given), wanted(nullptr, dtype, {count}), any_shape(true) {}
  Argument(const char* name, const Tensor& given, DType dtype, std::int64_t rows, std::int64_t last)
      : name(name), given(given), wanted(nullptr, dtype, {rows, last}), any_shape(true) {}
};

// All are as wanted, and contiguous.
void expect(const char* operation, std::initializer_list<Argument> arguments);
// `t` is a contiguous float32 or bfloat16 tensor of at least `rank` axes.
void expect_activation(const char* operation, const char* argument, const Tensor& t, int rank = 1);

// What a stream beside t must be: float32 of its shape.
inline Tensor stream_like(Tensor t) {
  t.dtype = DType::float32;
  return t;
}

// Number of rows of the last axis.
inline std::int64_t rows_of(const Tensor& t) {
  return t.numel() > 0 ? t.numel() / t.dim(-1) : 0;
}

}  // namespace onescale

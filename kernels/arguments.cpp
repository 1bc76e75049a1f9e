#include "kernels/arguments.h"

namespace onescale {
namespace {

void fail(const char* operation, const char* argument, const Tensor& t, const std::string& expected) {
  throw Error(str(operation, ": ", argument, " is ", t.empty() ? "empty" : t.describe(),
                  t.contiguous() ? "" : " with strides", ", expected ", expected));
}

}  // namespace

void expect_like(const char* operation, const char* argument, const Tensor& t, const Tensor& other) {
  if (t.dtype != other.dtype || t.rank != other.rank || t.shape != other.shape || !t.contiguous()) {
    fail(operation, argument, t, str("contiguous ", other.describe()));
  }
}

void expect(const char* operation, const char* argument, const Tensor& t, DType dtype,
            std::initializer_list<std::int64_t> shape) {
  expect_like(operation, argument, t, Tensor(nullptr, dtype, shape));
}

void expect_count(const char* operation, const char* argument, const Tensor& t, DType dtype, std::int64_t count) {
  if (t.dtype != dtype || t.numel() != count || !t.contiguous()) {
    fail(operation, argument, t, str(count, " contiguous elements of ", name_of(dtype)));
  }
}

void expect_activation(const char* operation, const char* argument, const Tensor& t, int rank) {
  if ((t.dtype != DType::float32 && t.dtype != DType::bfloat16) || t.rank < rank || !t.contiguous()) {
    fail(operation, argument, t, str("a contiguous float32 or bfloat16 tensor of at least ", rank, " axes"));
  }
}

}  // namespace onescale

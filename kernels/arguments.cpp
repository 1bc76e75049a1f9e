#include "kernels/arguments.h"

namespace onescale {
namespace {

[[noreturn]] void fail(const char* operation, const char* argument, const Tensor& t, const std::string& expected) {
  throw Error(str(operation, ": ", argument, " is ", t.empty() ? "empty" : t.describe(),
                  t.contiguous() ? "" : " with strides", ", expected ", expected));
}

}  // namespace

void expect(const char* operation, std::initializer_list<Argument> arguments) {
  for (const auto& [name, t, wanted, any_shape] : arguments) {
    const bool by_row = any_shape && wanted.rank == 2;
    const bool fits = any_shape
                          ? t.numel() == wanted.numel() && (!by_row || (t.rank > 0 && t.dim(-1) == wanted.dim(-1)))
                          : t.rank == wanted.rank && t.shape == wanted.shape;
    if (fits && t.dtype == wanted.dtype && t.contiguous()) continue;
    fail(operation, name, t,
         any_shape && !by_row ? str(wanted.numel(), " contiguous elements of ", name_of(wanted.dtype))
                              : str("contiguous ", wanted.describe()));
  }
}

void expect_activation(const char* operation, const char* argument, const Tensor& t, int rank) {
  if ((t.dtype != DType::float32 && t.dtype != DType::bfloat16) || t.rank < rank || !t.contiguous()) {
    fail(operation, argument, t, str("a contiguous float32 or bfloat16 tensor of at least ", rank, " axes"));
  }
}

}  // namespace onescale

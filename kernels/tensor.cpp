#include "kernels/tensor.h"

#include "kernels/error.h"

namespace onescale {

namespace {

struct Type {
  const char* name;
  std::int64_t size;
};
constexpr Type types[] = {{"float32", 4}, {"bfloat16", 2}, {"float64", 8}, {"int32", 4}, {"int64", 8}};

// Strides of a row-major layout.
void lay_out(Tensor& t) {
  std::int64_t step = 1;
  for (int i = t.rank; i-- > 0; step *= t.shape.data()[i]) t.stride.data()[i] = step;
}

}  // namespace

std::int64_t size_of(DType dtype) {
  return types[static_cast<int>(dtype)].size;
}

const char* name_of(DType dtype) {
  return types[static_cast<int>(dtype)].name;
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<std::int64_t> dims) : data(data), dtype(dtype) {
  check(dims.size() <= max_rank, "a tensor has at most ", max_rank, " axes, not ", dims.size());
  for (std::int64_t d : dims) shape[static_cast<std::size_t>(rank++)] = d;
  lay_out(*this);
}

std::int64_t Tensor::numel() const {
  if (rank == 0) return 0;
  std::int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= shape.data()[i];
  return n;
}

bool Tensor::contiguous() const {
  std::int64_t step = 1;
  for (int i = rank; i-- > 0; step *= shape.data()[i]) {
    if (shape.data()[i] != 1 && stride.data()[i] != step) return false;
  }
  return true;
}

Tensor Tensor::slice(int axis, std::int64_t begin, std::int64_t end) const {
  const int a = axis < 0 ? axis + rank : axis;
  check(begin >= 0 && begin <= end && end <= shape.data()[a], "slice [", begin, ", ", end, ") of axis ", axis, " of ",
        describe());
  Tensor out = *this;
  out.shape.data()[a] = end - begin;
  if (data) out.data = as<char>() + begin * stride.data()[a] * size_of(dtype);
  return out;
}

Tensor Tensor::view(std::initializer_list<std::int64_t> dims) const {
  check(contiguous(), "a view needs a contiguous tensor, this is ", describe());
  Tensor out(data, dtype, dims);
  const std::int64_t others = std::abs(out.numel());
  for (std::int64_t& d : out.shape) {
    if (d == -1) d = others ? numel() / others : 0;
  }
  lay_out(out);
  check(out.numel() == numel(), describe(), " cannot be viewed as ", out.describe());
  return out;
}

Tensor Tensor::split(int axis, std::int64_t outer, std::int64_t inner) const {
  check(axis >= 0 && rank < max_rank && shape.data()[axis] == outer * inner, "axis ", axis, " of ", describe(),
        " is not ", outer, " x ", inner);
  Tensor out = *this;
  for (int i = out.rank++; i > axis; --i)
    out.shape.data()[i] = shape.data()[i - 1], out.stride.data()[i] = stride.data()[i - 1];
  out.shape.data()[axis] = outer;
  out.shape.data()[axis + 1] = inner;
  out.stride.data()[axis] = stride.data()[axis] * inner;
  return out;
}

std::string Tensor::describe() const {
  std::string text = str(name_of(dtype), " [");
  for (int i = 0; i < rank; ++i) text += str(i ? ", " : "", shape.data()[i]);
  return text + "]";
}

}  // namespace onescale

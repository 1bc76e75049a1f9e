#include "kernels/tensor.h"

#include "kernels/error.h"

namespace onescale {

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return 2;
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float64:
      return "float64";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
  }
  return "?";
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<std::int64_t> dims) : data(data), dtype(dtype) {
  check(dims.size() <= max_rank, "a tensor has at most ", max_rank, " axes, not ", dims.size());
  for (std::int64_t d : dims) shape[static_cast<std::size_t>(rank++)] = d;
  std::int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    stride[static_cast<std::size_t>(i)] = step;
    step *= shape[static_cast<std::size_t>(i)];
  }
}

std::int64_t Tensor::numel() const {
  if (rank == 0) return 0;
  std::int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= dim(i);
  return n;
}

bool Tensor::contiguous() const {
  std::int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (dim(i) != 1 && stride[static_cast<std::size_t>(i)] != step) return false;
    step *= dim(i);
  }
  return true;
}

Tensor Tensor::slice(int axis, std::int64_t begin, std::int64_t end) const {
  const auto a = static_cast<std::size_t>(axis < 0 ? axis + rank : axis);
  check(begin >= 0 && begin <= end && end <= shape[a], "slice [", begin, ", ", end, ") of axis ", axis, " of ",
        describe());
  Tensor out = *this;
  out.shape[a] = end - begin;
  if (data) out.data = static_cast<char*>(data) + begin * stride[a] * size_of(dtype);
  return out;
}

Tensor Tensor::view(std::initializer_list<std::int64_t> dims) const {
  check(contiguous(), "a view needs a contiguous tensor, this is ", describe());
  Tensor out(data, dtype, dims);
  std::int64_t known = 1;
  int open = -1;
  for (int i = 0; i < out.rank; ++i) {
    if (out.dim(i) == -1)
      open = i;
    else
      known *= out.dim(i);
  }
  if (open >= 0) {
    out.shape[static_cast<std::size_t>(open)] = known ? numel() / known : 0;
    std::int64_t step = 1;
    for (int i = out.rank - 1; i >= 0; --i) {
      out.stride[static_cast<std::size_t>(i)] = step;
      step *= out.dim(i);
    }
  }
  check(out.numel() == numel(), describe(), " cannot be viewed as ", out.describe());
  return out;
}

Tensor Tensor::split_last(std::int64_t outer, std::int64_t inner) const {
  check(rank >= 1 && rank < max_rank && dim(-1) == outer * inner, describe(), " has no last axis of ", outer, " x ",
        inner);
  Tensor out = *this;
  const auto last = static_cast<std::size_t>(rank - 1);
  ++out.rank;
  out.shape[last] = outer;
  out.shape[last + 1] = inner;
  out.stride[last + 1] = stride[last];
  out.stride[last] = stride[last] * inner;
  return out;
}

Tensor Tensor::split_first(std::int64_t outer, std::int64_t inner) const {
  check(rank >= 1 && rank < max_rank && dim(0) == outer * inner, describe(), " has no first axis of ", outer, " x ",
        inner);
  Tensor out = *this;
  ++out.rank;
  for (int i = rank; i > 1; --i) {
    out.shape[static_cast<std::size_t>(i)] = shape[static_cast<std::size_t>(i - 1)];
    out.stride[static_cast<std::size_t>(i)] = stride[static_cast<std::size_t>(i - 1)];
  }
  out.shape[0] = outer;
  out.shape[1] = inner;
  out.stride[1] = stride[0];
  out.stride[0] = stride[0] * inner;
  return out;
}

std::string Tensor::describe() const {
  std::string text = str(name_of(dtype), " [");
  for (int i = 0; i < rank; ++i) text += str(i ? ", " : "", dim(i));
  return text + "]";
}

}  // namespace onescale

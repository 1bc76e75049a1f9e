// A tensor is a view: pointer, dtype, shape, strides. It owns nothing and is passed by value.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/bfloat16.h"

namespace onescale {

enum class DType : std::uint8_t { float32, bfloat16, float64, int32, int64 };

std::int64_t size_of(DType dtype);  // bytes of one element
const char* name_of(DType dtype);   // "float32", ...

struct Tensor {
  static constexpr int max_rank = 4;

  void* data = nullptr;
  DType dtype = DType::float32;
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> stride{};  // in elements

  Tensor() = default;
  // A contiguous row-major view of `data`.
  Tensor(void* data, DType dtype, std::initializer_list<std::int64_t> shape);

  // An empty tensor (default-constructed) stands for an absent optional argument. A tensor without data but with a
  // shape is what a dry run passes around.
  bool empty() const { return rank == 0; }
  std::int64_t numel() const;
  std::int64_t bytes() const { return numel() * size_of(dtype); }
  bool contiguous() const;
  std::int64_t dim(int axis) const { return shape[static_cast<std::size_t>(axis < 0 ? axis + rank : axis)]; }

  // Elements [begin, end) along `axis`, sharing the data.
  Tensor slice(int axis, std::int64_t begin, std::int64_t end) const;
  // The same elements in another shape; the tensor must be contiguous. One dimension may be -1.
  Tensor view(std::initializer_list<std::int64_t> shape) const;
  // The first or the last axis split in two; works on any strides.
  Tensor split_first(std::int64_t outer, std::int64_t inner) const { return split(0, outer, inner); }
  Tensor split_last(std::int64_t outer, std::int64_t inner) const { return split(rank - 1, outer, inner); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  std::string describe() const;  // "float32 [4, 256, 768]"

 private:
  Tensor split(int axis, std::int64_t outer, std::int64_t inner) const;
};

}  // namespace onescale

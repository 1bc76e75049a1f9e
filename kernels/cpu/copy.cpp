// Transfers, fill and copy.
#include <algorithm>
#include <cstring>

#include "kernels/arguments.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale {
namespace {

// A piece of work of loops that only move memory: 16K elements.
constexpr std::int64_t piece = std::int64_t{1} << 14;

// The elements of a tensor as rows along its last axis, after neighbouring axes that lie together in both tensors are
// merged. A row is cut into pieces.
struct Walk {
  int rank = 0;
  std::array<std::int64_t, Tensor::max_rank> shape{}, a{}, b{};
  std::int64_t pieces = 0;  // a row

  Walk(const Tensor& x, const Tensor& y) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(x.rank); ++i) {
      if (x.shape[i] == 1 && x.rank > 1) continue;
      const auto last = static_cast<std::size_t>(rank - 1);
      if (rank > 0 && a[last] == x.stride[i] * x.shape[i] && b[last] == y.stride[i] * y.shape[i]) {
        shape[last] *= x.shape[i];
        a[last] = x.stride[i];
        b[last] = y.stride[i];
      } else {
        shape[last + 1] = x.shape[i];
        a[last + 1] = x.stride[i];
        b[last + 1] = y.stride[i];
        ++rank;
      }
    }
    if (rank == 0) {  // one element
      rank = 1;
      shape[0] = a[0] = b[0] = 1;
    }
    pieces = (shape[static_cast<std::size_t>(rank - 1)] + piece - 1) / piece;
  }

  // body(offset in x, offset in y, elements) for every piece. The elements of a piece lie `a` and `b` of the last axis
  // apart.
  template <class Body>
  void run(int threads, const Body& body) const {
    const auto last = static_cast<std::size_t>(rank - 1);
    std::int64_t rows = 1;
    for (std::size_t i = 0; i < last; ++i) rows *= shape[i];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t item = 0; item < rows * pieces; ++item) {
      const std::int64_t begin = item % pieces * piece;
      std::int64_t row = item / pieces, x = begin * a[last], y = begin * b[last];
      for (std::size_t i = last; i-- > 0; row /= shape[i]) {
        x += row % shape[i] * a[i];
        y += row % shape[i] * b[i];
      }
      body(x, y, std::min(piece, shape[last] - begin));
    }
  }
  std::int64_t step_a() const {
    return a[static_cast<std::size_t>(rank - 1)];
  }
  std::int64_t step_b() const {
    return b[static_cast<std::size_t>(rank - 1)];
  }
};

template <class To, class From>
void copy_elements(To* to, const From* from, const Walk& walk, int threads) {
  const std::int64_t a = walk.step_a(), b = walk.step_b();
  walk.run(threads, [=](std::int64_t x, std::int64_t y, std::int64_t n) {
    To* p = to + x;
    const From* q = from + y;
    if constexpr (std::is_same_v<To, From>) {
      if (a == 1 && b == 1)
        std::memcpy(p, q, static_cast<std::size_t>(n) * sizeof(To));
      else
        for (std::int64_t i = 0; i < n; ++i) p[i * a] = q[i * b];
    } else {
      if (a == 1 && b == 1)
        cpu::each_vector(n, [&](std::int64_t i, auto part) { part.store(p + i, part.load(q + i)); });
      else
        for (std::int64_t i = 0; i < n; ++i) cpu::put(p[i * a], cpu::to_float(q[i * b]));
    }
  });
}

template <class T>
void fill_elements(Tensor dst, T value, int threads) {
  const Walk walk(dst, dst);
  walk.run(threads, [&](std::int64_t x, std::int64_t, std::int64_t n) {
    T* p = dst.as<T>() + x;
    if (walk.step_a() == 1)
      std::fill_n(p, n, value);
    else
      for (std::int64_t i = 0; i < n; ++i) p[i * walk.step_a()] = value;
  });
}

}  // namespace

void CpuDevice::upload(Tensor dst, const void* src) {
  expect_count("upload", "dst", dst, dst.dtype, dst.numel());
  if (!dry_ && dst.bytes() > 0) std::memcpy(dst.data, src, static_cast<std::size_t>(dst.bytes()));
}

void CpuDevice::download(void* dst, Tensor src) {
  expect_count("download", "src", src, src.dtype, src.numel());
  if (!dry_ && src.bytes() > 0) std::memcpy(dst, src.data, static_cast<std::size_t>(src.bytes()));
}

void CpuDevice::fill(Tensor dst, float value) {
  check(!dst.empty(), "fill: dst is empty");
  Run run(*this, "fill", 0, static_cast<double>(dst.bytes()));
  if (!run) return;
  switch (dst.dtype) {
    case DType::float32:
      return fill_elements(dst, value, threads_);
    case DType::float64:
      return fill_elements(dst, static_cast<double>(value), threads_);
    case DType::int32:
      return fill_elements(dst, static_cast<std::int32_t>(value), threads_);
    case DType::int64:
      return fill_elements(dst, static_cast<std::int64_t>(value), threads_);
    case DType::bfloat16: {
      bf16 stored;
      cpu::put(stored, value);
      return fill_elements(dst, stored, threads_);
    }
  }
}

void CpuDevice::copy(Tensor dst, Tensor src) {
  const auto real = [](DType t) { return t == DType::float32 || t == DType::bfloat16; };
  check(dst.rank == src.rank && dst.shape == src.shape && !dst.empty(), "copy: dst is ", dst.describe(), ", src ",
        src.describe(), "; they must have one shape");
  check(dst.dtype == src.dtype || (real(dst.dtype) && real(src.dtype)), "copy: from ", src.describe(), " to ",
        dst.describe(), "; only float32 and bfloat16 are converted");
  Run run(*this, "copy", 0, static_cast<double>(dst.bytes() + src.bytes()));
  if (!run) return;
  const Walk walk(dst, src);
  if (dst.dtype != src.dtype) {
    if (dst.dtype == DType::float32)
      copy_elements(dst.as<float>(), src.as<bf16>(), walk, threads_);
    else
      copy_elements(dst.as<bf16>(), src.as<float>(), walk, threads_);
  } else if (size_of(dst.dtype) == 2) {
    copy_elements(dst.as<std::uint16_t>(), src.as<std::uint16_t>(), walk, threads_);
  } else if (size_of(dst.dtype) == 4) {
    copy_elements(dst.as<std::uint32_t>(), src.as<std::uint32_t>(), walk, threads_);
  } else {
    copy_elements(dst.as<std::uint64_t>(), src.as<std::uint64_t>(), walk, threads_);
  }
}

}  // namespace onescale

// Transfers, fill and copy.
#include <algorithm>
#include <cstring>

#include "kernels/arguments.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

// body(offset in a, offset in b, elements) for the stretches of two tensors of one shape whose elements lie together in
// both, cut into pieces of at most 16K.
template <class Body>
void each_stretch(const Tensor& a, const Tensor& b, int threads, const Body& body) {
  constexpr std::int64_t most = std::int64_t{1} << 14;
  int outer = a.rank;  // axes that are not part of a stretch
  std::int64_t size = 1;
  while (outer > 0 &&
         (a.shape.data()[outer - 1] == 1 || (a.stride.data()[outer - 1] == size && b.stride.data()[outer - 1] == size)))
    size *= a.shape.data()[--outer];
  const std::int64_t pieces = (size + most - 1) / most, stretches = size > 0 ? a.numel() / size : 0;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t item = 0; item < stretches * pieces; ++item) {
    const std::int64_t begin = item % pieces * most;
    std::int64_t index = item / pieces, in_a = begin, in_b = begin;
    for (int i = outer; i-- > 0; index /= a.shape.data()[i]) {
      in_a += index % a.shape.data()[i] * a.stride.data()[i];
      in_b += index % a.shape.data()[i] * b.stride.data()[i];
    }
    body(in_a, in_b, std::min(most, size - begin));
  }
}

}  // namespace

void CpuDevice::upload(Tensor dst, const void* src) {
  expect("upload", {{"dst", dst, dst.dtype, dst.numel()}});
  if (!dry_ && dst.bytes() > 0) std::memcpy(dst.data, src, static_cast<std::size_t>(dst.bytes()));
}

void CpuDevice::download(void* dst, Tensor src) {
  expect("download", {{"src", src, src.dtype, src.numel()}});
  if (!dry_ && src.bytes() > 0) std::memcpy(dst, src.data, static_cast<std::size_t>(src.bytes()));
}

void CpuDevice::fill(Tensor dst, float value) {
  if (dst.dtype == DType::float64)
    expect("fill", {{"dst", dst, dst.dtype, dst.numel()}});
  else
    expect_activation("fill", "dst", dst);
  Run run(*this, "fill", 0, dst.bytes());
  if (!run) return;
  const auto set = [&]<class T>(T stored) {
    each_piece(dst.numel(), threads_, [=, to = dst.as<T>()](std::int64_t begin, std::int64_t end) {
      std::fill(to + begin, to + end, stored);
    });
  };
  if (dst.dtype == DType::float64) return set(double{value});
  with_storage(dst.dtype, [&](auto stored) {
    put(stored, value);
    set(stored);
  });
}

void CpuDevice::copy(Tensor dst, Tensor src) {
  const auto real = [](DType t) { return t == DType::float32 || t == DType::bfloat16; };
  check(dst.rank == src.rank && dst.shape == src.shape && !dst.empty(), "copy: dst is ", dst.describe(), ", src ",
        src.describe(), "; they must have one shape");
  check(dst.dtype == src.dtype || (real(dst.dtype) && real(src.dtype)), "copy: from ", src.describe(), " to ",
        dst.describe(), "; only float32 and bfloat16 are converted");
  Run run(*this, "copy", 0, dst.bytes() + src.bytes());
  if (!run) return;
  if (dst.dtype == src.dtype) {
    const std::int64_t size = size_of(dst.dtype);
    each_stretch(dst, src, threads_, [&](std::int64_t to, std::int64_t from, std::int64_t n) {
      std::memcpy(dst.as<char>() + to * size, src.as<char>() + from * size, static_cast<std::size_t>(n * size));
    });
    return;
  }
  with_storage(src.dtype, [&]<class From>(From) {
    using To = std::conditional_t<std::is_same_v<From, float>, bf16, float>;
    each_stretch(dst, src, threads_, [&](std::int64_t to, std::int64_t from, std::int64_t n) {
      each_vector(n, [p = dst.as<To>() + to, q = src.as<From>() + from](std::int64_t i, auto part) {
        part.store(p + i, part.load(q + i));
      });
    });
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

// Linear layers: shapes, work and the small cases; the arithmetic is in product.
#include <algorithm>

#include "kernels/arguments.h"
#include "kernels/cpu/column_sum.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/product.h"

namespace onescale {
namespace {

using std::int64_t;

// An activation [n, columns] as a matrix: rows of unit stride, `stride` apart.
struct Matrix {
  void* data;
  int64_t n, columns, stride;
};

Matrix matrix(const char* operation, const char* argument, const Tensor& t, DType dtype, int64_t n, int64_t columns) {
  bool ok = t.rank >= 2 && t.dtype == dtype && t.dim(-1) == columns && rows_of(t) == n;
  if (ok) {
    const auto row = static_cast<std::size_t>(t.rank - 2);
    ok = (t.stride[row + 1] == 1 || columns == 1) && (t.stride[row] >= columns || n == 1);
    for (std::size_t i = 0; i < row; ++i) ok = ok && t.stride[i] == t.stride[i + 1] * t.shape[i + 1];
    if (ok) return {t.data, n, columns, t.stride[row]};
  }
  throw Error(str(operation, ": ", argument, " is ", t.describe(), ", but must be ", name_of(dtype), " [", n, ", ",
                  columns, "] with contiguous rows of equal distance"));
}

// The few tokens of decoding read every weight once: a loop over the weights as they lie, no packing.
constexpr int64_t few_tokens = 4;

template <class T>
void linear_few(const Matrix& y, const Matrix& x, const T* W, const T* b, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t j = 0; j < y.columns; ++j) {
    const T* w = W + j * x.columns;
    for (int64_t i = 0; i < x.n; ++i) {
      const T* row = static_cast<const T*>(x.data) + i * x.stride;
      cpu::f16x sum[4] = {};
      cpu::each_vector_of_4(x.columns,
                            [&](int64_t k, auto part, int s) { sum[s] += part.load(row + k) * part.load(w + k); });
      const float total = cpu::sum((sum[0] + sum[1]) + (sum[2] + sum[3])) + (b == nullptr ? 0 : cpu::to_float(b[j]));
      cpu::put(static_cast<T*>(y.data)[i * y.stride + j], total);
    }
  }
}

}  // namespace

void CpuDevice::linear(Tensor y, Tensor x, Tensor W, Tensor b) {
  expect_activation("linear", "W", W, 2);
  const int64_t out = W.dim(0), in = W.dim(1), n = rows_of(x);
  const Matrix x_ = matrix("linear", "x", x, W.dtype, n, in), y_ = matrix("linear", "y", y, W.dtype, n, out);
  if (!b.empty()) expect("linear", "b", b, W.dtype, {out});
  const cpu::Product product{n, out, in, W.dtype, W.dtype, threads_};
  const double flops = 2.0 * static_cast<double>(n) * static_cast<double>(in * out);
  Run run(*this, "linear", flops, static_cast<double>(x.bytes() + W.bytes() + y.bytes()),
          n <= few_tokens ? 0 : product.scratch_bytes());
  if (!run) return;
  if (n <= few_tokens) {
    cpu::with_storage(W.dtype,
                      [&]<class T>(T) { linear_few<T>(y_, x_, W.as<T>(), b.empty() ? nullptr : b.as<T>(), threads_); });
    return;
  }
  product.run(y_.data, y_.stride, {x_.data, x_.stride, 1}, {W.data, in, 1}, b.empty() ? nullptr : b.data, false,
              run.scratch());
}

void CpuDevice::linear_backward(Tensor dx, Tensor dW, Tensor db, Tensor dy, Tensor x, Tensor W, Write write) {
  const char* name = "linear_backward";
  expect_activation(name, "W", W, 2);
  const int64_t out = W.dim(0), in = W.dim(1), n = rows_of(x);
  const Matrix x_ = matrix(name, "x", x, W.dtype, n, in), dy_ = matrix(name, "dy", dy, W.dtype, n, out);
  expect(name, "dW", dW, DType::float32, {out, in});
  if (!db.empty()) expect(name, "db", db, DType::float32, {out});
  const cpu::Product to_x{n, in, out, W.dtype, W.dtype, threads_}, to_W{out, in, n, W.dtype, DType::float32, threads_};
  const bool accumulate = write == Write::accumulate;
  const double flops = 2.0 * static_cast<double>(n) * static_cast<double>(in * out);
  const auto bytes = static_cast<double>(dy.bytes() + x.bytes() + (accumulate ? 2 : 1) * dW.bytes());
  const bool needs_x = !dx.empty();
  const auto x_bytes = needs_x ? static_cast<double>(dx.bytes() + W.bytes()) : 0.0;
  Run run(*this, name, needs_x ? 2 * flops : flops, bytes + x_bytes,
          std::max(to_W.scratch_bytes(), needs_x ? to_x.scratch_bytes() : 0));
  if (needs_x) {
    const Matrix dx_ = matrix(name, "dx", dx, W.dtype, n, in);
    if (run) to_x.run(dx_.data, dx_.stride, {dy_.data, dy_.stride, 1}, {W.data, 1, in}, nullptr, false, run.scratch());
  }
  if (!run) return;
  if (n == 0 && !accumulate) std::fill_n(dW.as<float>(), out * in, 0.0f);
  to_W.run(dW.data, in, {dy_.data, 1, dy_.stride}, {x_.data, 1, x_.stride}, nullptr, accumulate, run.scratch());
  if (!db.empty()) {
    cpu::with_storage(W.dtype, [&]<class T>(T) {
      cpu::column_sum(db.as<float>(), static_cast<const T*>(dy_.data), n, out, dy_.stride, write, threads_);
    });
  }
}

}  // namespace onescale

// Linear layers: shapes, work and the small cases; the arithmetic is in product.
#include <algorithm>

#include "kernels/arguments.h"
#include "kernels/cpu/column_sum.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/product.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

using std::int64_t;

// The few tokens of decoding read every weight once: a loop over the weights as they lie, no packing.
constexpr int64_t few_tokens = 4;

template <class T>
void linear_few(T* y, const T* x, const T* W, const float* b, int64_t n, int64_t out, int64_t in, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t j = 0; j < out; ++j) {
    const T* w = W + j * in;
    for (int64_t i = 0; i < n; ++i) {
      const T* row = x + i * in;
      f16x sum[4] = {};
      each_vector_of_4(in, [&](int64_t k, auto part, int s) { sum[s] += part.load(row + k) * part.load(w + k); });
      const float total = cpu::sum((sum[0] + sum[1]) + (sum[2] + sum[3])) + (b == nullptr ? 0 : b[j]);
      put(y[i * out + j], total);
    }
  }
}

}  // namespace

void CpuDevice::linear(Tensor y, Tensor x, Tensor W, Tensor b) {
  expect_activation("linear", "W", W, 2);
  const int64_t out = W.dim(0), in = W.dim(1), n = rows_of(x);
  expect("linear", {{"W", W, W.dtype, {out, in}}, {"x", x, W.dtype, n, in}, {"y", y, W.dtype, n, out}});
  if (!b.empty()) expect("linear", {{"b", b, DType::float32, {out}}});
  const Product product{n, out, in, {x.data, in, 1}, {W.data, in, 1}, W.dtype, W.dtype, threads_, bf16_};
  Run run(*this, "linear", 2 * n * in * out, x.bytes() + W.bytes() + y.bytes(),
          n <= few_tokens ? 0 : product.scratch_bytes());
  if (!run) return;
  if (n > few_tokens) return product.run(y.data, b.as<float>(), false, run.scratch());
  with_storage(W.dtype,
               [&]<class T>(T) { linear_few(y.as<T>(), x.as<T>(), W.as<T>(), b.as<float>(), n, out, in, threads_); });
}

void CpuDevice::linear_backward(Tensor dx, Tensor dW, Tensor db, Tensor dy, Tensor x, Tensor W, Write write) {
  const char* name = "linear_backward";
  expect_activation(name, "W", W, 2);
  const int64_t out = W.dim(0), in = W.dim(1), n = rows_of(x);
  expect(name, {{"W", W, W.dtype, {out, in}},
                {"x", x, W.dtype, n, in},
                {"dy", dy, W.dtype, n, out},
                {"dx", dx, W.dtype, n, in},
                {"dW", dW, DType::float32, {out, in}}});
  if (!db.empty()) expect(name, {{"db", db, DType::float32, {out}}});
  const Product to_x{n, in, out, {dy.data, out, 1}, {W.data, 1, in}, W.dtype, W.dtype, threads_, bf16_};
  const Product to_W{out, in, n, {dy.data, 1, out}, {x.data, 1, in}, W.dtype, DType::float32, threads_, bf16_};
  const bool accumulate = write == Write::accumulate;
  Run run(*this, name, 4 * n * in * out,
          dy.bytes() + x.bytes() + (accumulate ? 2 : 1) * dW.bytes() + dx.bytes() + W.bytes(),
          std::max(to_W.scratch_bytes(), to_x.scratch_bytes()));
  if (!run) return;
  to_x.run(dx.data, nullptr, false, run.scratch());
  to_W.run(dW.data, nullptr, accumulate, run.scratch());
  if (!db.empty()) {
    with_storage(W.dtype, [&]<class T>(T) { column_sum(db.as<float>(), dy.as<T>(), n, out, out, write, threads_); });
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

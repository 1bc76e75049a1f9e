// Layer normalisation and the residual stream. A row is read from memory once; later sweeps over it find it in the
// first cache.
#include <cmath>

#include "kernels/arguments.h"
#include "kernels/cpu/column_sum.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/loops.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

template <class T>
void normalise(T* y, float& mean, float& rstd, const T* x, const T* w, const T* b, std::int64_t C, float eps) {
  const auto total = [C](const f16x(&v)[4]) { return sum((v[0] + v[1]) + (v[2] + v[3])) / static_cast<float>(C); };
  f16x sum[4] = {}, squares[4] = {};
  each_vector_of_4(C, [&](std::int64_t i, auto part, int k) { sum[k] += part.load(x + i); });
  mean = total(sum);
  const f16x centre = splat(mean);
  each_vector_of_4(C, [&](std::int64_t i, auto part, int k) {
    const f16x d = part.or_else(part.load(x + i) - centre, 0);
    squares[k] += d * d;
  });
  rstd = 1 / std::sqrt(total(squares) + eps);
  const f16x scale = splat(rstd);
  each_vector(C, [&](std::int64_t i, auto part) {
    __builtin_prefetch(x + C + i);  // the next row, whose first sweep would otherwise wait for memory
    part.store(y + i, (part.load(x + i) - centre) * scale * part.load(w + i) + part.load(b + i));
  });
}

// One mean and rstd a row, weights of the activation's type.
void check_norm(const char* operation, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w) {
  expect_activation(operation, "x", x);
  expect(operation, {{"mean", mean, DType::float32, rows_of(x)},
                     {"rstd", rstd, DType::float32, rows_of(x)},
                     {"w", w, x.dtype, {x.dim(-1)}}});
}

void check_residual(const char* operation, const Tensor& out, const Tensor& x, const Tensor& y, const Tensor& bias,
                    const Dropout& dropout) {
  expect_activation(operation, "x", x);
  expect(operation, {{"out", out, x}, {"y", y, x}, {"bias", bias, x.dtype, {x.dim(-1)}}});
  check_dropout(operation, dropout, x);
}

// out = x + drop(y + bias) row by row; then(i, row i of out).
template <class Then>
void add_residual(const Tensor& out, const Tensor& x, const Tensor& y, const Tensor& bias, const Dropout& dropout,
                  int threads, const Then& then) {
  const std::int64_t C = x.dim(-1);
  with_storage(x.dtype, [&]<class T>(T) {
    each_token(rows_of(x), dropout, threads, [&](std::int64_t i, auto& drop) {
      T* const sum = out.as<T>() + i * C;
      const T *const from = x.as<T>() + i * C, *const add = y.as<T>() + i * C, *const b = bias.as<T>();
      each_vector(C, [&](std::int64_t j, auto part) {
        part.store(sum + j, part.load(from + j) + drop.at(j, part.load(add + j) + part.load(b + j)));
      });
      then(i, sum);
    });
  });
}

}  // namespace

void CpuDevice::layernorm(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps) {
  check_norm("layernorm", x, mean, rstd, w);
  expect("layernorm", {{"y", y, x}, {"b", b, w}});
  Run run(*this, "layernorm", 8 * x.numel(), 2 * x.bytes());
  if (!run) return;
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  with_storage(x.dtype, [&]<class T>(T) {
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t i = 0; i < n; ++i) {
      normalise(y.as<T>() + i * C, mean.as<float>()[i], rstd.as<float>()[i], x.as<T>() + i * C, w.as<T>(), b.as<T>(), C,
                eps);
    }
  });
}

void CpuDevice::layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                   Tensor w, Write write) {
  check_norm("layernorm_backward", x, mean, rstd, w);
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  expect("layernorm_backward",
         {{"dx", dx, x}, {"dy", dy, x}, {"dw", dw, DType::float32, {C}}, {"db", db, DType::float32, {C}}});
  Run run(*this, "layernorm_backward", 16 * x.numel(), 4 * x.bytes(), sum_bytes(n, 2 * C));
  if (!run) return;
  // With g = dy w and x_hat = (x - mean) rstd: dx += rstd (g - mean(g) - x_hat mean(g x_hat)), the means over the row.
  with_storage(x.dtype, [&]<class T>(T) {
    sum_rows({dw, db}, n, run.scratch<float>(), write, threads_, [=](std::int64_t row, float* sum_w) {
      float* const sum_b = sum_w + C;
      const T *const in = x.as<T>() + row * C, *const dout = dy.as<T>() + row * C, *const weight = w.as<T>();
      T* const din = dx.as<T>() + row * C;
      const f16x centre = splat(mean.as<float>()[row]), scale = splat(rstd.as<float>()[row]);
      f16x g_sum = {}, gx_sum = {};
      each_vector(C, [&](std::int64_t i, auto part) {
        const f16x d = part.load(dout + i), normal = (part.load(in + i) - centre) * scale,
                   g = d * part.load(weight + i);
        g_sum += g;
        gx_sum += g * normal;
        part.store(sum_w + i, part.load(sum_w + i) + d * normal);
        part.store(sum_b + i, part.load(sum_b + i) + d);
      });
      const f16x g_mean = splat(cpu::sum(g_sum) / static_cast<float>(C)),
                 gx_mean = splat(cpu::sum(gx_sum) / static_cast<float>(C));
      each_vector(C, [&](std::int64_t i, auto part) {
        const f16x normal = (part.load(in + i) - centre) * scale, g = part.load(dout + i) * part.load(weight + i);
        part.store(din + i, part.load(din + i) + scale * (g - g_mean - normal * gx_mean));
      });
    });
  });
}

void CpuDevice::residual_layernorm(Tensor out, Tensor y_norm, Tensor mean, Tensor rstd, Tensor x, Tensor y, Tensor bias,
                                   Tensor w, Tensor b, float eps, const Dropout& dropout) {
  check_norm("residual_layernorm", x, mean, rstd, w);
  check_residual("residual_layernorm", out, x, y, bias, dropout);
  expect("residual_layernorm", {{"y_norm", y_norm, x}, {"b", b, w}});
  Run run(*this, "residual_layernorm", 10 * x.numel(), 4 * x.bytes());
  if (!run) return;
  // From the stored sum, so that a backward pass which reads it sees the same statistics.
  add_residual(out, x, y, bias, dropout, threads_, [&, C = x.dim(-1)]<class T>(std::int64_t i, const T* sum) {
    normalise(y_norm.as<T>() + i * C, mean.as<float>()[i], rstd.as<float>()[i], sum, w.as<T>(), b.as<T>(), C, eps);
  });
}

void CpuDevice::residual(Tensor out, Tensor x, Tensor y, Tensor bias, const Dropout& dropout) {
  check_residual("residual", out, x, y, bias, dropout);
  Run run(*this, "residual", 2 * x.numel(), 3 * x.bytes());
  if (run) add_residual(out, x, y, bias, dropout, threads_, [](auto...) {});
}

void CpuDevice::residual_backward(Tensor dy, Tensor dbias, Tensor dout, const Dropout& dropout, Write write) {
  expect_activation("residual_backward", "dout", dout);
  const std::int64_t n = rows_of(dout), C = dout.dim(-1);
  expect("residual_backward", {{"dy", dy, dout}, {"dbias", dbias, DType::float32, {C}}});
  check_dropout("residual_backward", dropout, dout);
  Run run(*this, "residual_backward", 2 * dout.numel(), 2 * dout.bytes(), sum_bytes(n, C));
  if (!run) return;
  with_storage(dout.dtype, [&]<class T>(T) {
    with_dropout(dropout, [&](auto drop) {
      sum_rows({dbias}, n, run.scratch<float>(), write, threads_, [=](std::int64_t row, float* sum) mutable {
        const T* const from = dout.as<T>() + row * C;
        T* const to = dy.as<T>() + row * C;
        drop.start(row);
        each_vector(C, [&](std::int64_t i, auto part) {
          const f16x d = drop.at(i, part.load(from + i));
          part.store(to + i, d);
          part.store(sum + i, part.load(sum + i) + d);
        });
      });
    });
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

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
void normalise(T* y, float& mean, float& rstd, const float* x, const float* w, const float* b, std::int64_t C,
               float eps) {
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

// y is the normalised tensor or its gradient: one mean and rstd a row of it; x is a stream.
void check_norm(const char* operation, const Tensor& y, const Tensor& mean, const Tensor& rstd, const Tensor& x,
                const Tensor& w) {
  expect_activation(operation, "y", y);
  expect(operation, {{"mean", mean, DType::float32, rows_of(y)},
                     {"rstd", rstd, DType::float32, rows_of(y)},
                     {"x", x, stream_like(y)},
                     {"w", w, DType::float32, {y.dim(-1)}}});
}

void check_residual(const char* operation, const Tensor& out, const Tensor& x, const Tensor& y, const Tensor& bias,
                    const Dropout& dropout) {
  expect_activation(operation, "y", y);
  expect(operation,
         {{"x", x, stream_like(y)}, {"out", out, stream_like(y)}, {"bias", bias, DType::float32, {y.dim(-1)}}});
  check_dropout(operation, dropout, x);
}

// out = x + drop(y + bias) row by row; then(i, row i of out).
template <class T, class Then>
void add_residual(const Tensor& out, const Tensor& x, const Tensor& y, const Tensor& bias, const Dropout& dropout,
                  int threads, const Then& then) {
  const std::int64_t C = x.dim(-1);
  each_token(rows_of(x), dropout, threads, [&](std::int64_t i, auto& drop) {
    float* const sum = out.as<float>() + i * C;
    const float *const from = x.as<float>() + i * C, *const b = bias.as<float>();
    const T* const add = y.as<T>() + i * C;
    each_vector(C, [&](std::int64_t j, auto part) {
      part.store(sum + j, part.load(from + j) + drop.at(j, part.load(add + j) + part.load(b + j)));
    });
    then(i, sum);
  });
}

}  // namespace

void CpuDevice::layernorm(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps) {
  check_norm("layernorm", y, mean, rstd, x, w);
  expect("layernorm", {{"b", b, w}});
  Run run(*this, "layernorm", 8 * x.numel(), x.bytes() + y.bytes());
  if (!run) return;
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  with_storage(y.dtype, [&]<class T>(T) {
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t i = 0; i < n; ++i) {
      normalise(y.as<T>() + i * C, mean.as<float>()[i], rstd.as<float>()[i], x.as<float>() + i * C, w.as<float>(),
                b.as<float>(), C, eps);
    }
  });
}

void CpuDevice::layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                   Tensor w, Write write) {
  check_norm("layernorm_backward", dy, mean, rstd, x, w);
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  expect("layernorm_backward", {{"dx", dx, x}, {"dw", dw, DType::float32, {C}}, {"db", db, DType::float32, {C}}});
  Run run(*this, "layernorm_backward", 16 * x.numel(), 3 * x.bytes() + dy.bytes(), sum_bytes(n, 2 * C));
  if (!run) return;
  // With g = dy w and x_hat = (x - mean) rstd: dx += rstd (g - mean(g) - x_hat mean(g x_hat)), the means over the row.
  with_storage(dy.dtype, [&]<class T>(T) {
    sum_rows({dw, db}, n, run.scratch<float>(), write, threads_, [=](std::int64_t row, float* sum_w) {
      float* const sum_b = sum_w + C;
      const float *const in = x.as<float>() + row * C, *const weight = w.as<float>();
      const T* const dout = dy.as<T>() + row * C;
      float* const din = dx.as<float>() + row * C;
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
  check_norm("residual_layernorm", y_norm, mean, rstd, x, w);
  check_residual("residual_layernorm", out, x, y, bias, dropout);
  expect("residual_layernorm", {{"y_norm", y_norm, y}, {"b", b, w}});
  Run run(*this, "residual_layernorm", 10 * x.numel(), 2 * x.bytes() + 2 * y.bytes());
  if (!run) return;
  with_storage(y.dtype, [&, C = x.dim(-1)]<class T>(T) {
    add_residual<T>(out, x, y, bias, dropout, threads_, [&](std::int64_t i, const float* sum) {
      normalise(y_norm.as<T>() + i * C, mean.as<float>()[i], rstd.as<float>()[i], sum, w.as<float>(), b.as<float>(), C,
                eps);
    });
  });
}

void CpuDevice::residual(Tensor out, Tensor x, Tensor y, Tensor bias, const Dropout& dropout) {
  check_residual("residual", out, x, y, bias, dropout);
  Run run(*this, "residual", 2 * x.numel(), 2 * x.bytes() + y.bytes());
  if (!run) return;
  with_storage(y.dtype, [&]<class T>(T) { add_residual<T>(out, x, y, bias, dropout, threads_, [](auto...) {}); });
}

void CpuDevice::residual_backward(Tensor dy, Tensor dbias, Tensor dout, const Dropout& dropout, Write write) {
  expect_activation("residual_backward", "dy", dy);
  const std::int64_t n = rows_of(dout), C = dout.dim(-1);
  expect("residual_backward", {{"dout", dout, stream_like(dy)}, {"dbias", dbias, DType::float32, {C}}});
  check_dropout("residual_backward", dropout, dout);
  Run run(*this, "residual_backward", 2 * dout.numel(), dout.bytes() + dy.bytes(), sum_bytes(n, C));
  if (!run) return;
  with_storage(dy.dtype, [&]<class T>(T) {
    with_dropout(dropout, [&](auto drop) {
      sum_rows({dbias}, n, run.scratch<float>(), write, threads_, [=](std::int64_t row, float* sum) mutable {
        const float* const from = dout.as<float>() + row * C;
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

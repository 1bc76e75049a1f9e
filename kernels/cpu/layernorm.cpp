// Layer normalisation and the residual stream. A row is read from memory once; later sweeps over it find it in the
// first cache.
#include <cmath>

#include "kernels/arguments.h"
#include "kernels/cpu/column_sum.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/loops.h"

namespace onescale {
namespace {

using cpu::each_vector;
using cpu::each_vector_of_4;
using cpu::f16x;
using cpu::splat;

template <class T>
void normalise(T* y, float& mean, float& rstd, const T* x, const T* w, const T* b, std::int64_t C, float eps) {
  const auto total = [C](const f16x(&v)[4]) { return cpu::sum((v[0] + v[1]) + (v[2] + v[3])) / static_cast<float>(C); };
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

// y like x, one mean and rstd a row, weights of the activation's type.
void check_norm(const char* operation, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w) {
  expect_activation(operation, "x", x);
  expect_count(operation, "mean", mean, DType::float32, rows_of(x));
  expect_count(operation, "rstd", rstd, DType::float32, rows_of(x));
  expect(operation, "w", w, x.dtype, {x.dim(-1)});
}

template <class T, class Drop>
void add_residual(T* out, const T* x, const T* y, const T* bias, std::int64_t C, Drop& drop) {
  each_vector(C, [&](std::int64_t i, auto part) {
    part.store(out + i, part.load(x + i) + drop.at(i, part.load(y + i) + part.load(bias + i)));
  });
}

}  // namespace

void CpuDevice::layernorm(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps) {
  check_norm("layernorm", x, mean, rstd, w);
  expect_like("layernorm", "y", y, x);
  expect_like("layernorm", "b", b, w);
  const double size = static_cast<double>(x.numel());
  Run run(*this, "layernorm", 8 * size, static_cast<double>(2 * x.bytes()));
  if (!run) return;
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  cpu::with_storage(x.dtype, [&]<class T>(T) {
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
  expect_like("layernorm_backward", "dx", dx, x);
  expect_like("layernorm_backward", "dy", dy, x);
  const std::int64_t n = rows_of(x), C = x.dim(-1), blocks = cpu::sum_blocks(n);
  expect("layernorm_backward", "dw", dw, DType::float32, {C});
  expect("layernorm_backward", "db", db, DType::float32, {C});
  const double size = static_cast<double>(x.numel());
  Run run(*this, "layernorm_backward", 16 * size, static_cast<double>(4 * x.bytes()),
          2 * blocks * C * size_of(DType::float32));
  if (!run) return;
  float* const partial_w = reinterpret_cast<float*>(run.scratch());
  float* const partial_b = partial_w + blocks * C;
  cpu::with_storage(x.dtype, [&]<class T>(T) {
  // With g = dy w and x_hat = (x - mean) rstd: dx += rstd (g - mean(g) - x_hat mean(g x_hat)), the means over the row.
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t block = 0; block < blocks; ++block) {
      float *const sum_w = partial_w + block * C, *const sum_b = partial_b + block * C;
      std::fill_n(sum_w, C, 0.0f);
      std::fill_n(sum_b, C, 0.0f);
      for (std::int64_t row = block * cpu::sum_block; row < std::min(n, (block + 1) * cpu::sum_block); ++row) {
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
      }
    }
  });
  cpu::column_sum(dw.as<float>(), partial_w, blocks, C, C, write, threads_);
  cpu::column_sum(db.as<float>(), partial_b, blocks, C, C, write, threads_);
}

void CpuDevice::residual_layernorm(Tensor out, Tensor y_norm, Tensor mean, Tensor rstd, Tensor x, Tensor y, Tensor bias,
                                   Tensor w, Tensor b, float eps, const Dropout& dropout) {
  check_norm("residual_layernorm", x, mean, rstd, w);
  expect_like("residual_layernorm", "out", out, x);
  expect_like("residual_layernorm", "y_norm", y_norm, x);
  expect_like("residual_layernorm", "y", y, x);
  expect_like("residual_layernorm", "bias", bias, w);
  expect_like("residual_layernorm", "b", b, w);
  cpu::check_dropout("residual_layernorm", dropout, x);
  Run run(*this, "residual_layernorm", 10.0 * static_cast<double>(x.numel()), static_cast<double>(4 * x.bytes()));
  if (!run) return;
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  cpu::with_storage(x.dtype, [&]<class T>(T) {
    cpu::with_dropout(dropout, [&](auto drop) {
#pragma omp parallel for num_threads(threads_) schedule(static) firstprivate(drop)
      for (std::int64_t i = 0; i < n; ++i) {
        T* const sum = out.as<T>() + i * C;
        drop.start(i);
        add_residual(sum, x.as<T>() + i * C, y.as<T>() + i * C, bias.as<T>(), C, drop);
        // From the stored sum, so that a backward pass which reads it sees the same statistics.
        normalise(y_norm.as<T>() + i * C, mean.as<float>()[i], rstd.as<float>()[i], sum, w.as<T>(), b.as<T>(), C, eps);
      }
    });
  });
}

void CpuDevice::residual(Tensor out, Tensor x, Tensor y, Tensor bias, const Dropout& dropout) {
  expect_activation("residual", "x", x);
  expect_like("residual", "out", out, x);
  expect_like("residual", "y", y, x);
  expect("residual", "bias", bias, x.dtype, {x.dim(-1)});
  cpu::check_dropout("residual", dropout, x);
  Run run(*this, "residual", 2.0 * static_cast<double>(x.numel()), static_cast<double>(3 * x.bytes()));
  if (!run) return;
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  cpu::with_storage(x.dtype, [&]<class T>(T) {
    cpu::with_dropout(dropout, [&](auto drop) {
#pragma omp parallel for num_threads(threads_) schedule(static) firstprivate(drop)
      for (std::int64_t i = 0; i < n; ++i) {
        drop.start(i);
        add_residual(out.as<T>() + i * C, x.as<T>() + i * C, y.as<T>() + i * C, bias.as<T>(), C, drop);
      }
    });
  });
}

void CpuDevice::residual_backward(Tensor dy, Tensor dbias, Tensor dout, const Dropout& dropout, Write write) {
  expect_activation("residual_backward", "dout", dout);
  expect_like("residual_backward", "dy", dy, dout);
  const std::int64_t n = rows_of(dout), C = dout.dim(-1), blocks = cpu::sum_blocks(n);
  expect("residual_backward", "dbias", dbias, DType::float32, {C});
  cpu::check_dropout("residual_backward", dropout, dout);
  Run run(*this, "residual_backward", 2.0 * static_cast<double>(dout.numel()), static_cast<double>(2 * dout.bytes()),
          blocks * C * size_of(DType::float32));
  if (!run) return;
  float* const partial = reinterpret_cast<float*>(run.scratch());
  cpu::with_storage(dout.dtype, [&]<class T>(T) {
    cpu::with_dropout(dropout, [&](auto drop) {
#pragma omp parallel for num_threads(threads_) schedule(static) firstprivate(drop)
      for (std::int64_t block = 0; block < blocks; ++block) {
        float* const sum = partial + block * C;
        std::fill_n(sum, C, 0.0f);
        for (std::int64_t row = block * cpu::sum_block; row < std::min(n, (block + 1) * cpu::sum_block); ++row) {
          const T* const from = dout.as<T>() + row * C;
          T* const to = dy.as<T>() + row * C;
          drop.start(row);
          each_vector(C, [&](std::int64_t i, auto part) {
            const f16x d = drop.at(i, part.load(from + i));
            part.store(to + i, d);
            part.store(sum + i, part.load(sum + i) + d);
          });
        }
      }
    });
  });
  cpu::column_sum(dbias.as<float>(), partial, blocks, C, C, write, threads_);
}

}  // namespace onescale

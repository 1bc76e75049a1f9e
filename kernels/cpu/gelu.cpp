// GELU, both kinds, and its gradient.
#include "kernels/arguments.h"
#include "kernels/cpu/column_sum.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale {
namespace {

using cpu::f16x;
using cpu::splat;

// gelu(x) = x Phi(x); here Phi and gelu'.
struct Curve {
  f16x phi, slope;
};

constexpr float log2_e = 1.4426950409f;

// Phi is replaced by (1 + tanh(u)) / 2 = 1 / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
struct TanhCurve {
  Curve operator()(f16x x) const {
    constexpr float root = 0.7978845608f, cubic = 0.044715f;
    const f16x square = x * x;
    const f16x power = x * (splat(-2 * root * log2_e) + splat(-2 * root * log2_e * cubic) * square);
    const f16x phi = splat(1.0f) / (splat(1.0f) + cpu::exp2(cpu::min(power, splat(126.0f))));
    const f16x slope = x * (splat(2 * root) + splat(6 * root * cubic) * square);  // 2 x du/dx
    return {phi, phi + slope * phi * (splat(1.0f) - phi)};
  }
};

// Phi(-|x|) = t P(t) e^(-x^2/2) / 2 with t = 1 / (1 + p |x| / sqrt(2)), Abramowitz and Stegun (1964) 7.1.26: error
// below 1e-7. The density that the slope needs is the same exponential.
struct ErfCurve {
  Curve operator()(f16x x) const {
    const f16x t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f * 0.7071067812f) * cpu::max(x, -x));
    const f16x e = cpu::exp2(splat(-0.5f * log2_e) * x * x);
    f16x p = splat(0.5f * 1.061405429f) * t + splat(0.5f * -1.453152027f);
    p = p * t + splat(0.5f * 1.421413741f);
    p = p * t + splat(0.5f * -0.284496736f);
    p = p * t + splat(0.5f * 0.254829592f);
    const f16x tail = p * t * e;
    const f16x phi = cpu::select(x < f16x{}, tail, splat(1.0f) - tail);
    return {phi, phi + x * e * splat(0.3989422804f)};
  }
};

template <class Body>
void with_curve(Gelu kind, Body&& body) {
  if (kind == Gelu::tanh) {
    body(TanhCurve{});
  } else {
    body(ErfCurve{});
  }
}

}  // namespace

void CpuDevice::gelu(Tensor y, Tensor x, Gelu kind) {
  expect_activation("gelu", "x", x);
  expect_like("gelu", "y", y, x);
  Run run(*this, "gelu", 20.0 * static_cast<double>(x.numel()), static_cast<double>(2 * x.bytes()));
  if (!run) return;
  constexpr std::int64_t piece = std::int64_t{1} << 12;
  const std::int64_t n = x.numel();
  cpu::with_storage(x.dtype, [&]<class T>(T) {
    with_curve(kind, [&](auto curve) {
#pragma omp parallel for num_threads(threads_) schedule(static)
      for (std::int64_t begin = 0; begin < n; begin += piece) {
        const T* const from = x.as<T>() + begin;
        T* const to = y.as<T>() + begin;
        cpu::each_vector(std::min(piece, n - begin), [&](std::int64_t i, auto part) {
          const f16x v = part.load(from + i);
          part.store(to + i, v * curve(v).phi);
        });
      }
    });
  });
}

void CpuDevice::gelu_backward(Tensor dy, Tensor dbias, Tensor x, Gelu kind, Write write) {
  expect_activation("gelu_backward", "x", x);
  expect_like("gelu_backward", "dy", dy, x);
  const std::int64_t n = rows_of(x), C = x.dim(-1), blocks = cpu::sum_blocks(n);
  expect("gelu_backward", "dbias", dbias, DType::float32, {C});
  Run run(*this, "gelu_backward", 30.0 * static_cast<double>(x.numel()), static_cast<double>(3 * x.bytes()),
          blocks * C * size_of(DType::float32));
  if (!run) return;
  float* const partial = reinterpret_cast<float*>(run.scratch());
  cpu::with_storage(x.dtype, [&]<class T>(T) {
    with_curve(kind, [&](auto curve) {
#pragma omp parallel for num_threads(threads_) schedule(static)
      for (std::int64_t block = 0; block < blocks; ++block) {
        float* const sum = partial + block * C;
        std::fill_n(sum, C, 0.0f);
        for (std::int64_t row = block * cpu::sum_block; row < std::min(n, (block + 1) * cpu::sum_block); ++row) {
          const T* const in = x.as<T>() + row * C;
          T* const d = dy.as<T>() + row * C;
          cpu::each_vector(C, [&](std::int64_t i, auto part) {
            const f16x v = part.load(d + i) * curve(part.load(in + i)).slope;
            part.store(d + i, v);
            part.store(sum + i, part.load(sum + i) + v);
          });
        }
      }
    });
  });
  cpu::column_sum(dbias.as<float>(), partial, blocks, C, C, write, threads_);
}

}  // namespace onescale

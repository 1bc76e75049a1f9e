// GELU, both kinds, and its gradient.
#include "kernels/arguments.h"
#include "kernels/cpu/column_sum.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

// gelu(x) = x Phi(x); here Phi and gelu'.
struct Curve {
  f16x phi, slope;
};

// Phi is replaced by (1 + tanh(u)) / 2 = 1 / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
struct TanhCurve {
  [[gnu::always_inline]] Curve operator()(f16x x) const {
    constexpr float root = 0.7978845608f, cubic = 0.044715f;
    const f16x square = x * x;
    const f16x power = x * (splat(-2 * root * log2_e) + splat(-2 * root * log2_e * cubic) * square);
    const f16x phi = splat(1.0f) / (splat(1.0f) + exp2(min(power, splat(126.0f))));
    const f16x slope = x * (splat(2 * root) + splat(6 * root * cubic) * square);  // 2 x du/dx
    return {phi, phi + slope * phi * (splat(1.0f) - phi)};
  }
};

// Phi(-|x|) = t P(t) e^(-x^2/2) / 2 with t = 1 / (1 + p |x| / sqrt(2)), Abramowitz and Stegun (1964) 7.1.26: error
// below 1e-7. The density that the slope needs is the same exponential.
struct ErfCurve {
  [[gnu::always_inline]] Curve operator()(f16x x) const {
    const f16x t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f * 0.7071067812f) * max(x, -x));
    const f16x e = exp2(splat(-0.5f * log2_e) * x * x);
    const f16x p = polynomial(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f, 0.5f * 1.421413741f, 0.5f * -0.284496736f,
                              0.5f * 0.254829592f);
    const f16x tail = p * t * e;
    const f16x phi = select(less(x, f16x{}), tail, splat(1.0f) - tail);
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
  expect("gelu", {{"y", y, x}});
  Run run(*this, "gelu", 20 * x.numel(), 2 * x.bytes());
  if (!run) return;
  with_storage(x.dtype, [&]<class T>(T) {
    with_curve(kind, [&](auto curve) {
      each_vector(x.numel(), threads_, [=, from = x.as<T>(), to = y.as<T>()](std::int64_t i, auto part) {
        const f16x v = part.load(from + i);
        part.store(to + i, v * curve(v).phi);
      });
    });
  });
}

void CpuDevice::gelu_backward(Tensor dy, Tensor dbias, Tensor x, Gelu kind, Write write) {
  expect_activation("gelu_backward", "x", x);
  const std::int64_t n = rows_of(x), C = x.dim(-1);
  expect("gelu_backward", {{"dy", dy, x}, {"dbias", dbias, DType::float32, {C}}});
  Run run(*this, "gelu_backward", 30 * x.numel(), 3 * x.bytes(), sum_bytes(n, C));
  if (!run) return;
  with_storage(x.dtype, [&]<class T>(T) {
    with_curve(kind, [&](auto curve) {
      sum_rows({dbias}, n, run.scratch<float>(), write, threads_, [=](std::int64_t row, float* sum) {
        const T* const in = x.as<T>() + row * C;
        T* const d = dy.as<T>() + row * C;
        each_vector(C, [&](std::int64_t i, auto part) {
          const f16x v = part.load(d + i) * curve(part.load(in + i)).slope;
          part.store(d + i, v);
          part.store(sum + i, part.load(sum + i) + v);
        });
      });
    });
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

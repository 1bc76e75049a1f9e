// The updates of weights: one pass over weights, moments and gradient. Each element depends on itself alone, so any
// sharding gives the same bits.
#include <cmath>

#include "kernels/arguments.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

[[gnu::always_inline]] inline f16x square_root(const f16x& v) {
  return each_register<f16x>(
      [](vec x) __attribute__((always_inline)) {
#if defined(__AVX512F__)
        return std::bit_cast<vec>(_mm512_maskz_sqrt_ps(0xffff, std::bit_cast<__m512>(x)));
#else
        return std::bit_cast<vec>(_mm256_sqrt_ps(std::bit_cast<__m256>(x)));
#endif
      },
      v);
}

// update(i, part) returns the new weights at i, which are stored in w and, rounded, in `compute` where there is one.
template <class Update>
void update_weights(Tensor w, Tensor compute, int threads, const Update& update) {
  bf16* rounded = compute.dtype == DType::bfloat16 ? compute.as<bf16>() : nullptr;
  each_vector(w.numel(), threads, [=, weights = w.as<float>()](std::int64_t i, auto part) {
    const f16x v = update(i, part);
    part.store(weights + i, v);
    if (rounded) part.store(rounded + i, v);
  });
}

void check_weights(const char* operation, const Tensor& w, const Tensor& g, const Tensor& compute) {
  expect(operation, {{"w", w, DType::float32, w.numel()}, {"g", g, DType::float32, w.numel()}});
  if (!compute.empty() && compute.dtype != DType::float32)
    expect(operation, {{"compute", compute, DType::bfloat16, w.numel()}});
}

std::int64_t bytes_of(const Tensor& w, int moved, const Tensor& compute) {
  return moved * w.bytes() + (compute.dtype == DType::bfloat16 ? compute.bytes() : 0);
}

}  // namespace

void CpuDevice::adamw(Tensor w, Tensor m, Tensor v, Tensor g, Tensor compute, const AdamW& s) {
  check_weights("adamw", w, g, compute);
  expect("adamw", {{"m", m, DType::float32, w.numel()}, {"v", v, DType::float32, w.numel()}});
  check(s.count >= 1, "adamw: count = ", s.count, " must include this update, the first is 1");
  Run run(*this, "adamw", 15 * w.numel(), bytes_of(w, 7, compute));
  if (!run) return;
  const double lr = s.lr, b1 = s.beta1, b2 = s.beta2, count = static_cast<double>(s.count);
  const f16x scale = splat(s.gradient_scale), beta1 = splat(s.beta1), beta2 = splat(s.beta2), eps = splat(s.eps);
  const f16x rest1 = splat(static_cast<float>(1 - b1)), rest2 = splat(static_cast<float>(1 - b2));
  const f16x keep = splat(static_cast<float>(1 - lr * s.weight_decay));
  const f16x step = splat(static_cast<float>(lr / (1 - std::pow(b1, count))));
  const f16x root = splat(static_cast<float>(1 / std::sqrt(1 - std::pow(b2, count))));
  float *const weights = w.as<float>(), *const first = m.as<float>(), *const second = v.as<float>();
  const float* gradient = g.as<float>();
  update_weights(w, compute, threads_, [=](std::int64_t i, auto part) {
    const f16x d = part.load(gradient + i) * scale;
    const f16x mean = beta1 * part.load(first + i) + rest1 * d;
    const f16x square = beta2 * part.load(second + i) + rest2 * d * d;
    part.store(first + i, mean);
    part.store(second + i, square);
    return part.load(weights + i) * keep - step * mean / (square_root(square) * root + eps);
  });
}

void CpuDevice::sgd(Tensor w, Tensor g, Tensor compute, float lr, float weight_decay, float scale) {
  check_weights("sgd", w, g, compute);
  Run run(*this, "sgd", 4 * w.numel(), bytes_of(w, 3, compute));
  if (!run) return;
  float* weights = w.as<float>();
  const float* gradient = g.as<float>();
  update_weights(w, compute, threads_, [=](std::int64_t i, auto part) {
    const f16x old = part.load(weights + i);
    return old - splat(lr) * (splat(scale) * part.load(gradient + i) + splat(weight_decay) * old);
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

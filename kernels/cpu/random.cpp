// Normal numbers keyed by what they are for.
#include <cmath>
#include <numbers>

#include "kernels/arguments.h"
#include "kernels/cpu/cpu_device.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

// Four standard normal numbers from one draw (Box and Muller 1958), in float64 so that rounding to float32 hides the
// last bits in which mathematical libraries differ. The uniforms lie in (0, 1).
std::array<double, 4> normals(const Philox& draw) {
  std::array<double, 4> z{};
  for (std::size_t i = 0; i < 4; i += 2) {
    const double radius = std::sqrt(-2 * std::log((draw[i] + 0.5) * 0x1p-32));
    const double angle = 2 * std::numbers::pi * (draw[i + 1] * 0x1p-32);
    z[i] = radius * std::cos(angle);
    z[i + 1] = radius * std::sin(angle);
  }
  return z;
}

}  // namespace

void CpuDevice::random_normal(Tensor dst, std::uint64_t seed, std::int64_t tensor, std::int64_t first, float stddev) {
  expect("random_normal", {{"dst", dst, DType::float32, dst.numel()}});
  check(first >= 0 && tensor >= 0, "random_normal: first = ", first, " and tensor = ", tensor, " must not be negative");
  Run run(*this, "random_normal", 0, dst.bytes());
  if (!run) return;
  const std::int64_t end = first + dst.numel();
  float* out = dst.as<float>();
#pragma omp parallel for num_threads(threads_) schedule(static)
  for (std::int64_t group = first / 4; group < (end + 3) / 4; ++group) {
    const auto z = normals(philox({static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32),
                                   static_cast<std::uint32_t>(tensor), static_cast<std::uint32_t>(Site::weight)},
                                  seed));
    for (std::int64_t i = std::max(first, group * 4); i < std::min(end, group * 4 + 4); ++i) {
      out[i - first] = static_cast<float>(stddev * z[static_cast<std::size_t>(i % 4)]);
    }
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

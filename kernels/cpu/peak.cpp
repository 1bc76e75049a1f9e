// The rates that this machine reaches, by which the work of the operations is judged.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/transpose.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

// Seconds of the shortest of several trials.
template <class Body>
double shortest(int trials, const Body& body) {
  double best = std::numeric_limits<double>::infinity();
  while (trials-- > 0) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

// Chains of multiply-adds that stay in registers: enough of them to hide the latency, with two constants few enough for
// sixteen registers. All threads run at once, for that sets their clock, and each is asked for its own best trial,
// which nothing disturbed.
double CpuDevice::peak_flops(DType dtype) {
  constexpr int chains = 12;
  constexpr std::int64_t rounds = 1 << 15;  // less than 1 ms
  const bool pairs = dtype == DType::bfloat16 && bf16_ != Bf16::converted;
  double rate = 0, keep = 0;
#pragma omp parallel num_threads(threads_) reduction(+ : rate, keep)
  {
    vec a[chains];
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) a[c] = static_cast<float>(c + 2) - vec{};  // 1 would stay 1 and be removed
    double flops = 2.0 * chains * width * rounds;
    const double seconds = shortest(64, [&] {
      if (pairs) {
        flops = multiply_pairs(bf16_);
        return;
      }
      const vec scale = 0.999f - vec{}, add = 0.001f - vec{};
#pragma GCC unroll 1
      for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
        for (int c = 0; c < chains; ++c) a[c] = a[c] * scale + add;
      }
    });
    rate += flops / seconds;
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) keep += static_cast<double>(a[c][0]);
  }
  // What was computed is used, so that the loop is not removed. Threads beyond the cores take turns.
  return keep > 0 ? rate * std::min(1.0, static_cast<double>(available_threads()) / threads_) : 0;
}

// y = a x + y over arrays that together take four times the last-level cache: two reads and a write, as in an
// optimizer.
double CpuDevice::peak_bandwidth() {
  const std::int64_t cache = std::max<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  const std::int64_t n = std::clamp<std::int64_t>(cache / 2, 1 << 23, 1 << 27);
  CpuDevice memory(threads_, false);
  const auto array = [&] { return memory.allocate(Kind::workspace, DType::float32, {n}).as<float>(); };
  float *const x = array(), *const y = array();
  const double seconds = shortest(10, [&] {
    each_vector(n, threads_, [=](std::int64_t i, auto part) {
      part.store(y + i, part.load(x + i) * splat(0.5f) + part.load(y + i));
    });
  });
  return 12.0 * static_cast<double>(n) / seconds;
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

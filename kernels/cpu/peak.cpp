// The rates that this machine reaches, by which the work of the operations is judged.
#include <unistd.h>

#include <algorithm>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/vec.h"

namespace onescale {
namespace {

using cpu::lanes;

// y = a x + y over arrays that together take four times the last-level cache: two reads and a write, as in an
// optimizer.
double measure_bandwidth(int threads) {
  const std::int64_t cache = std::max<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  constexpr std::int64_t piece = std::int64_t{1} << 14;
  const std::int64_t n = std::clamp<std::int64_t>(cache / 2, 1 << 23, 1 << 27) / piece * piece;
  CpuDevice memory(threads, false);
  float* x = memory.allocate(Kind::workspace, DType::float32, {n}).as<float>();
  float* y = memory.allocate(Kind::workspace, DType::float32, {n}).as<float>();
  double best = 0;
  for (int round = 0; round < 10; ++round) {
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t begin = 0; begin < n; begin += piece) {
      for (std::int64_t i = begin; i < begin + piece; i += lanes) {
        cpu::store(y + i, cpu::load(x + i) * cpu::splat(0.5f) + cpu::load(y + i));
      }
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::max(best, 12.0 * static_cast<double>(n) / time.count());
  }
  return best;
}

// Chains of multiply-adds that stay in registers; enough of them to hide the latency, few enough for sixteen registers
// of 32 bytes.
double measure_flops(int threads) {
#ifdef __AVX512F__
  constexpr int chains = 12;
#else
  constexpr int chains = 6;
#endif
  constexpr std::int64_t rounds = 1 << 16;  // 3 ms: short enough that some of many trials are not disturbed
  double best = 0, keep = 0;
  for (int trial = 0; trial < 64; ++trial) {
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads) reduction(+ : keep)
    {
      cpu::f16x a[chains];
      for (int c = 0; c < chains; ++c) a[c] = cpu::splat(static_cast<float>(c + 2));  // 1 would stay 1 and be removed
      const cpu::f16x scale = cpu::splat(0.999f), add = cpu::splat(0.001f);
      for (std::int64_t i = 0; i < rounds; ++i) {
        for (int c = 0; c < chains; ++c) a[c] = a[c] * scale + add;
      }
      for (int c = 0; c < chains; ++c) keep += static_cast<double>(cpu::sum(a[c]));
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * chains * lanes * static_cast<double>(rounds) * threads / time.count());
  }
  return keep > 0 ? best : 0;  // used, so that the loop is not removed
}

}  // namespace

double CpuDevice::peak_flops() {
  if (peak_flops_ == 0) peak_flops_ = measure_flops(threads_);
  return peak_flops_;
}

double CpuDevice::peak_bandwidth() {
  if (peak_bandwidth_ == 0) peak_bandwidth_ = measure_bandwidth(threads_);
  return peak_bandwidth_;
}

}  // namespace onescale

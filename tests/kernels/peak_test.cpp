// What a device says of its peak, beside a loop of assembly and beside its own products. Other programs disturb it.
#include <chrono>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// FLOP/s of one thread: twelve multiply-adds in flight, of 8 or 16 numbers each.
double assembly_peak(bool wide) {
  constexpr std::int64_t rounds = 1 << 15;
  double best = 1e9;
  for (int trial = 0; trial < 200; ++trial) {
    std::int64_t n = rounds;
    const double t = seconds([&] {
#define FMA(r, i) "vfmadd231ps %%" r "mm14, %%" r "mm15, %%" r "mm" #i "\n\t"
#define TWELVE(r) \
  FMA(r, 0)       \
  FMA(r, 1) FMA(r, 2) FMA(r, 3) FMA(r, 4) FMA(r, 5) FMA(r, 6) FMA(r, 7) FMA(r, 8) FMA(r, 9) FMA(r, 10) FMA(r, 11)
#define REGISTERS                                                                                                     \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14", "xmm15", "cc"
      if (wide)
        asm volatile("1: " TWELVE("z") "dec %0\n\tjne 1b\n\tvzeroupper" : "+r"(n) : : REGISTERS);
      else
        asm volatile("1: " TWELVE("y") "dec %0\n\tjne 1b\n\tvzeroupper" : "+r"(n) : : REGISTERS);
    });
    best = std::min(best, t);
  }
  return 2.0 * 12 * (wide ? 16 : 8) * rounds / best;
}

TEST(PeakSlow, IsThatOfAnAssemblyLoopAndNoProductIsAbove) {
  for (const Backend& backend : backends()) {
    if (absent(backend)) continue;
    const auto device = backend.make(1, false);
    // The clock may change between two measurements: the closest of several pairs counts.
    double nearest = 1e9, fastest = 0, peak = 0;
    const Tensor x = put(*device, DType::float32, {768, 768}, randoms(768 * 768, 1)),
                 W = put(*device, DType::float32, {768, 768}, randoms(768 * 768, 2)),
                 y = garbage(*device, DType::float32, {768, 768});
    for (int round = 0; round < 20; ++round) {
      const double now = device->peak_flops(DType::float32);
      peak = std::max(peak, now);
      nearest = std::min(nearest, std::abs(now / assembly_peak(std::string(backend.name) == "v4") - 1));
      for (int i = 0; i < 5; ++i)
        fastest = std::max(fastest, 2.0 * 768 * 768 * 768 / seconds([&] { device->linear(y, x, W, {}); }));
    }
    EXPECT_LT(nearest, 0.05) << backend.name;
    EXPECT_LT(fastest, 1.02 * peak) << backend.name;
    std::printf("%s: peak %.1f GFLOP/s, %.3f from the assembly's, fastest product %.1f\n", backend.name, peak / 1e9,
                nearest, fastest / 1e9);
  }
}

}  // namespace
}  // namespace onescale::contract

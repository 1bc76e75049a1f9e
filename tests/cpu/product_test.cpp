// Products of bfloat16 by every kind of instruction that this processor has, whichever of them the device would take,
// against float64. Operands lie as those of y, dx and dW do, between NaN that must reach nothing.
#include "kernels/cpu/product.h"

#include "kernels/cpu/vec.h"
#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

std::vector<cpu::Bf16> kinds() {
  std::vector<cpu::Bf16> all{cpu::Bf16::converted};
  if (cpu::register_bytes == 64 && __builtin_cpu_supports("avx512bf16")) all.push_back(cpu::Bf16::vectors);
  if (cpu::fastest_bf16() == cpu::Bf16::tiles) all.push_back(cpu::Bf16::tiles);
  return all;
}

std::vector<bf16> stored(const Values& values) {
  std::vector<bf16> out(values.size());
  for (std::size_t i = 0; i < out.size(); ++i) onescale::put(out[i], static_cast<float>(values[i]));
  return out;
}

struct Matrix {
  Values values;  // [lanes, K]
  std::vector<bf16> memory;
  cpu::Operand operand;

  Matrix(std::int64_t lanes, std::int64_t K, bool by_lane, unsigned seed)
      : values(randoms(lanes * K, seed, DType::bfloat16)) {
    constexpr std::int64_t edge = 64;
    Values laid(static_cast<std::size_t>(lanes * K + 2 * edge), std::nan(""));
    for (std::int64_t l = 0; l < lanes; ++l)
      for (std::int64_t k = 0; k < K; ++k)
        laid[static_cast<std::size_t>(edge + (by_lane ? l * K + k : k * lanes + l))] =
            values[static_cast<std::size_t>(l * K + k)];
    memory = stored(laid);
    operand = {memory.data() + edge, by_lane ? K : 1, by_lane ? 1 : lanes};
  }
};

// Sums of up to 5000 products in float32, then one rounding where c is bfloat16.
TEST(ProductOfBfloat16, AgreesWithFloat64ByEveryInstruction) {
  struct Size {
    std::int64_t M, N, K;
  };
  for (const auto& [M, N, K] :
       {Size{1, 1, 1}, Size{7, 33, 5}, Size{16, 16, 32}, Size{17, 48, 31}, Size{32, 32, 64}, Size{33, 99, 37},
        Size{61, 13, 1000}, Size{130, 70, 33}, Size{40, 40, 5000}, Size{5, 700, 96}}) {
    for (const bool a_by_lane : {true, false}) {
      for (const bool b_by_lane : {true, false}) {
        const Matrix a(M, K, a_by_lane, 1), b(N, K, b_by_lane, 2);
        const Values bias = randoms(N, 3), start = randoms(M * N, 4);
        Values exact(static_cast<std::size_t>(M * N));
        for (std::int64_t i = 0; i < M * N; ++i)
          for (std::int64_t k = 0; k < K; ++k)
            exact[static_cast<std::size_t>(i)] +=
                a.values[static_cast<std::size_t>(i / N * K + k)] * b.values[static_cast<std::size_t>(i % N * K + k)];
        for (const cpu::Bf16 kind : kinds()) {
          for (const DType output : {DType::float32, DType::bfloat16}) {
            const bool wide = output == DType::float32;
            Values first;
            for (const int threads : {1, 2, 3}) {
              const cpu::Product product{M, N, K, a.operand, b.operand, DType::bfloat16, output, threads, kind};
              std::vector<char> scratch(static_cast<std::size_t>(product.scratch_bytes()) + 64, '\xff');
              char* const aligned = scratch.data() + (64 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 64) % 64;
              std::vector<float> c(start.begin(), start.end()), b_row(bias.begin(), bias.end());
              std::vector<bf16> half = stored(start);
              void* const out = wide ? static_cast<void*>(c.data()) : half.data();
              product.run(out, wide ? nullptr : b_row.data(), wide, aligned);
              Values want = exact, got(want.size());
              for (std::size_t i = 0; i < got.size(); ++i) {
                want[i] += wide ? start[i] : bias[i % bias.size()];
                got[i] = wide ? c[i] : to_float(half[i]);
              }
              EXPECT_LT(relative_error(got, want), wide ? 1e-5 : 1.0 / 256)
                  << M << " " << N << " " << K << " kind " << static_cast<int>(kind) << " threads " << threads;
              if (first.empty()) first = got;
              EXPECT_EQ(got, first) << M << " " << N << " " << K << " kind " << static_cast<int>(kind);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace onescale::contract

// The column sums that gradients of biases share.
#include "kernels/cpu/column_sum.h"

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

template <class T>
Values column_sums(const Values& x, std::int64_t n, std::int64_t C, std::int64_t stride, Write write, int threads) {
  std::vector<T> stored(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) onescale::put(stored[i], static_cast<float>(x[i]));
  std::vector<float> out(static_cast<std::size_t>(C), 2.0f);
  cpu::column_sum(out.data(), stored.data(), n, C, stride, write, threads);
  return Values(out.begin(), out.end());
}

// Blocks of 32 rows keep the error of a sum of n terms near sqrt(n / 32) units of 2^-24.
TEST(ColumnSum, AddsEveryRow) {
  for (const std::int64_t C : {1, 37, 48, 128, 300}) {
    for (const std::int64_t n : {0, 1, 13, 32, 33, 1000}) {
      const std::int64_t stride = C + 5;
      const Values x = randoms(n * stride, 4, DType::bfloat16);
      Values want(static_cast<std::size_t>(C), 0.0);
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t c = 0; c < C; ++c)
          want[static_cast<std::size_t>(c)] += x[static_cast<std::size_t>(i * stride + c)];
      }
      const Values got = column_sums<float>(x, n, C, stride, Write::overwrite, 1);
      EXPECT_LT(relative_error(got, want), 1e-6) << n << " " << C;
      EXPECT_EQ(column_sums<float>(x, n, C, stride, Write::overwrite, 3), got);
      EXPECT_EQ(column_sums<bf16>(x, n, C, stride, Write::overwrite, 2), got);
      for (double& v : want) v += 2;
      EXPECT_LT(relative_error(column_sums<float>(x, n, C, stride, Write::accumulate, 2), want), 1e-6);
    }
  }
}

}  // namespace
}  // namespace onescale::contract

// Sums in float64, and the column sums that gradients of biases share.
#include "kernels/cpu/column_sum.h"
#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class Reduce : public testing::TestWithParam<Backend> {};
INSTANTIATE_TEST_SUITE_P(Contract, Reduce, testing::ValuesIn(backends()),
                         [](const auto& info) { return info.param.name; });

// Sums of up to 1e5 terms in float64: 1e-12 relative to the sum of magnitudes, far above rounding.
TEST_P(Reduce, SumsInFloat64) {
  for (const std::int64_t n : {1, 37, 16384, 16385, 100003}) {
    const Values x = randoms(n, 1);
    double sum = 0, squares = 0, size = 0;
    for (const double v : x) sum += v, squares += v * v, size += std::abs(v);
    std::vector<Values> results;
    for (int threads = 1; threads <= 3; ++threads) {
      const auto device = GetParam().make(threads, false);
      const Tensor t = put(*device, DType::float32, {n}, x), out = garbage(*device, DType::float64, {1});
      device->sum(out, t, Write::overwrite);
      const double first = get(*device, out)[0];
      EXPECT_NEAR(first, sum, 1e-12 * size);
      device->sum_of_squares(out, t, Write::accumulate);
      const double both = get(*device, out)[0];
      EXPECT_NEAR(both, sum + squares, 1e-12 * (size + squares));
      results.push_back({first, both});
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
  }
}

// One large value among small ones that float32 would lose, and squares beyond its range.
TEST_P(Reduce, LosesNothingToFloat32) {
  const auto device = GetParam().make(2, false);
  Values x(20000, 1.0);
  x[5000] = 1e10;
  const Tensor t = put(*device, DType::float32, {20000}, x),
               out = device->allocate(Kind::workspace, DType::float64, {1});
  device->sum(out, t, Write::overwrite);
  EXPECT_EQ(get(*device, out)[0], 1e10 + 19999);
  device->fill(t, 1e30f);
  device->sum_of_squares(out, t, Write::overwrite);
  EXPECT_NEAR(get(*device, out)[0] / 2e64, 1, 1e-6);  // 1e30 itself is rounded to float32
}

TEST_P(Reduce, NothingSumsToZero) {
  const auto device = GetParam().make(2, false);
  const Tensor out = garbage(*device, DType::float64, {1});
  device->sum(out, device->allocate(Kind::workspace, DType::float32, {0}), Write::overwrite);
  EXPECT_EQ(get(*device, out)[0], 0);
}

TEST_P(Reduce, RefusesOtherTypes) {
  const auto device = GetParam().make(1, false);
  const Tensor x = device->allocate(Kind::workspace, DType::bfloat16, {4}),
               out = device->allocate(Kind::workspace, DType::float64, {1});
  EXPECT_EQ(sentence([&] { device->sum(out, x, Write::overwrite); }),
            "sum: x is bfloat16 [4], expected 4 contiguous elements of float32");
  EXPECT_NE(sentence([&] { device->sum_of_squares(out.slice(0, 0, 0), x, Write::overwrite); }), "");
}

template <class T>
Values column_sums(const Values& x, std::int64_t n, std::int64_t C, std::int64_t stride, Write write, int threads) {
  std::vector<T> stored(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) cpu::put(stored[i], static_cast<float>(x[i]));
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

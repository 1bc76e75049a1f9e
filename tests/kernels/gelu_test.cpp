// GELU and its gradient against their formulas in float64.
#include <numbers>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class GeluContract : public Contract {};
CONTRACT_SUITE(GeluContract);

// Hendrycks and Gimpel (2016): x Phi(x), and its approximation by tanh.
double value(double x, Gelu kind) {
  if (kind == Gelu::erf) return x * 0.5 * std::erfc(-x / std::numbers::sqrt2);
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}
double slope(double x, Gelu kind) {
  if (kind == Gelu::erf)
    return 0.5 * std::erfc(-x / std::numbers::sqrt2) + x * std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
  const double root = std::sqrt(2 / std::numbers::pi), t = std::tanh(root * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

TEST(GeluReference, SlopeIsTheNumericOne) {
  for (const Gelu kind : {Gelu::tanh, Gelu::erf}) {
    for (double x = -6; x <= 6; x += 0.37) {
      EXPECT_NEAR((value(x + 1e-5, kind) - value(x - 1e-5, kind)) / 2e-5, slope(x, kind), 1e-9) << x;
    }
  }
}

// On a grid of float32 values the absolute error stays below 1e-6 (1 + |x|), a few units of float32: the sum 1 + e is
// rounded near 1.
TEST_P(GeluContract, IsExactOverItsRange) {
  for (const Gelu kind : {Gelu::tanh, Gelu::erf}) {
    const auto device = make();
    Values x;
    for (double v = -12; v <= 12; v += 0.0037) x.push_back(v);
    x.insert(x.end(), {0, 1e-30, -1e-30, 100, -100, 3e4, -3e4});
    x = rounded(x, dtype());
    const auto size = static_cast<std::int64_t>(x.size());
    const Tensor t = put(*device, dtype(), {size}, x), y = garbage(*device, dtype(), {size}),
                 d = put(*device, dtype(), {size}, Values(x.size(), 1.0)),
                 dbias = garbage(*device, DType::float32, {size});
    device->gelu(y, t, kind);
    device->gelu_backward(d, dbias, t, kind, Write::overwrite);
    const Values got = get(*device, y), dx = get(*device, d), sum = get(*device, dbias);
    for (std::size_t i = 0; i < x.size(); ++i) {
      // Half a unit of the last of 8 bits.
      const double allowed = dtype() == DType::bfloat16 ? 0x1p-8 : 0, unit = 1e-6;
      ASSERT_NEAR(got[i], value(x[i], kind), allowed * std::abs(value(x[i], kind)) + unit * (1 + std::abs(x[i])))
          << x[i];
      ASSERT_NEAR(dx[i], slope(x[i], kind), allowed * std::abs(slope(x[i], kind)) + 2 * unit) << x[i];
      ASSERT_NEAR(sum[i], slope(x[i], kind), 2 * unit) << x[i];  // the sum takes the values before they are rounded
    }
  }
}

TEST_P(GeluContract, GradientAndItsColumnSums) {
  for (const Gelu kind : {Gelu::tanh, Gelu::erf}) {
    for (const std::int64_t C : {1, 37, 48, 99, 200}) {
      for (const std::int64_t n : {1, 13, 32, 70}) {
        const Values x = randoms(n * C, 1, dtype(), 2), dy = randoms(n * C, 2, dtype());
        Values dx(x.size()), dbias(static_cast<std::size_t>(C), 0.0);
        double size = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
          dx[i] = dy[i] * slope(x[i], kind);
          dbias[i % static_cast<std::size_t>(C)] += dx[i];
          size += std::abs(dx[i]);
        }
        // A sum may cancel (one column has only one): its error, 3e-6 of a slope in float32, is measured against the
        // sizes that were added.
        const auto error = [&](const Values& got, double times) {
          double worst = 0;
          for (std::size_t c = 0; c < got.size(); ++c) worst += std::abs(got[c] - times * dbias[c]);
          return worst / (times * size);
        };
        std::vector<Values> results;
        for (int threads = 1; threads <= 3; ++threads) {
          const auto device = make(threads);
          const Tensor t = put(*device, dtype(), {n, C}, x), d = put(*device, dtype(), {n, C}, dy),
                       sum = garbage(*device, DType::float32, {C});
          device->gelu_backward(d, sum, t, kind, Write::overwrite);
          EXPECT_LT(relative_error(get(*device, d), dx), tolerance()) << C << " " << n;
          EXPECT_LT(error(get(*device, sum), 1), 3e-6) << C << " " << n;
          results.push_back(get(*device, sum));
          const Values all = get(*device, d);
          results.back().insert(results.back().end(), all.begin(), all.end());
          const Tensor again = put(*device, dtype(), {n, C}, dy);
          device->gelu_backward(again, sum, t, kind, Write::accumulate);
          EXPECT_LT(error(get(*device, sum), 2), 3e-6);
        }
        EXPECT_EQ(results[1], results[0]);
        EXPECT_EQ(results[2], results[0]);
      }
    }
  }
}

TEST_P(GeluContract, WorksInPlaceAndOverPieces) {
  const auto device = make(3);
  const Values x = randoms(3 * 4099, 3, dtype());
  const Tensor t = put(*device, dtype(), {3, 4099}, x);
  device->gelu(t, t, Gelu::tanh);
  Values want = x;
  for (double& v : want) v = value(v, Gelu::tanh);
  EXPECT_LT(relative_error(get(*device, t), want), tolerance());
}

TEST_P(GeluContract, RefusesWhatDoesNotFit) {
  const auto device = make();
  const Tensor x = device->allocate(Kind::workspace, dtype(), {4, 6}),
               db = device->allocate(Kind::workspace, DType::float32, {6});
  EXPECT_EQ(sentence([&] { device->gelu(x.slice(0, 0, 3), x, Gelu::tanh); }),
            str("gelu: y is ", name_of(dtype()), " [3, 6], expected contiguous ", name_of(dtype()), " [4, 6]"));
  EXPECT_NE(sentence([&] { device->gelu(x, x.slice(1, 0, 3), Gelu::tanh); }), "");
  EXPECT_NE(sentence([&] { device->gelu_backward(x, db.slice(0, 0, 4), x, Gelu::erf, Write::overwrite); }), "");
  EXPECT_NE(sentence([&] { device->gelu_backward(x, x, x, Gelu::erf, Write::overwrite); }), "");
}

}  // namespace
}  // namespace onescale::contract

// Sums in float64, and sums of pieces.
#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class Reduce : public Float32Contract {};
FLOAT32_CONTRACT_SUITE(Reduce);

// Sums of up to 1e5 terms in float64: 1e-12 relative to the sum of magnitudes, far above rounding.
TEST_P(Reduce, SumsInFloat64) {
  for (const std::int64_t n : {1, 37, 16384, 16385, 100003}) {
    const Values x = randoms(n, 1);
    double sum = 0, squares = 0, size = 0;
    for (const double v : x) sum += v, squares += v * v, size += std::abs(v);
    std::vector<Values> results;
    for (int threads = 1; threads <= 3; ++threads) {
      const auto device = make(threads, false);
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
  const auto device = make();
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
  const auto device = make();
  const Tensor out = garbage(*device, DType::float64, {1});
  device->sum(out, device->allocate(Kind::workspace, DType::float32, {0}), Write::overwrite);
  EXPECT_EQ(get(*device, out)[0], 0);
}

TEST_P(Reduce, RefusesOtherTypes) {
  const auto device = make(1, false);
  const Tensor x = device->allocate(Kind::workspace, DType::bfloat16, {4}),
               out = device->allocate(Kind::workspace, DType::float64, {1});
  EXPECT_EQ(sentence([&] { device->sum(out, x, Write::overwrite); }),
            "sum: x is bfloat16 [4], expected 4 contiguous elements of float32");
  EXPECT_NE(sentence([&] { device->sum_of_squares(out.slice(0, 0, 0), x, Write::overwrite); }), "");
}

class Pieces : public Contract {};
CONTRACT_SUITE(Pieces);

// float32 additions in the order of the pieces, one rounding at the end, whatever the number of threads.
TEST_P(Pieces, AreAddedInOrderAndRoundedOnce) {
  for (const std::int64_t n : {1, 15, 33, 40000}) {
    for (const unsigned count : {1u, 2u, 5u}) {
      std::vector<Values> x;
      for (unsigned p = 0; p < count; ++p) x.push_back(randoms(n, p, dtype(), p == 0 ? 1e4 : 1));
      std::vector<float> sum(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] = static_cast<float>(x[0][i]);
        for (unsigned p = 1; p < count; ++p) sum[i] += static_cast<float>(x[p][i]);
      }
      for (int threads = 1; threads <= 3; ++threads) {
        const auto device = make(threads);
        std::vector<Tensor> pieces;
        for (const Values& values : x) pieces.push_back(put(*device, dtype(), {n}, values));
        const Tensor out = garbage(*device, DType::float32, {n}), same = garbage(*device, dtype(), {n});
        device->sum_pieces(out, pieces, Write::overwrite);
        EXPECT_EQ(get(*device, out), Values(sum.begin(), sum.end()));
        device->sum_pieces(same, pieces, Write::overwrite);
        EXPECT_EQ(get(*device, same), rounded(Values(sum.begin(), sum.end()), dtype()));
        device->sum_pieces(out, pieces, Write::accumulate);
        EXPECT_EQ(get(*device, out)[0], 2 * static_cast<double>(sum[0]));
        device->sum_pieces(pieces.back(), pieces, Write::overwrite);  // into one of them
        EXPECT_EQ(get(*device, pieces.back()), get(*device, same));
      }
    }
  }
}

TEST_P(Pieces, RefusesOtherSizesAndTypes) {
  const auto device = make();
  const Tensor a = garbage(*device, dtype(), {4}), b = garbage(*device, dtype(), {5}),
               out = garbage(*device, DType::float32, {4}), wide = garbage(*device, DType::float64, {4});
  EXPECT_EQ(sentence([&] { device->sum_pieces(out, {}, Write::overwrite); }), "sum_pieces: there is no piece");
  EXPECT_NE(sentence([&] { device->sum_pieces(out, {a, b}, Write::overwrite); }), "");
  EXPECT_NE(sentence([&] { device->sum_pieces(wide, {a}, Write::overwrite); }), "");
  EXPECT_NE(sentence([&] { device->sum_pieces(wide, {wide}, Write::overwrite); }), "");
}

}  // namespace
}  // namespace onescale::contract

// The vector type against the scalar functions of the standard library.
#include "kernels/cpu/vec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "kernels/cpu/loops.h"
#include "tests/kernels/contract.h"

namespace onescale::cpu {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

bf16 stored(float x) {
  bf16 out;
  put(out, x);
  return out;
}

TEST(Vec, Bfloat16RoundsToNearestEven) {
  EXPECT_EQ(stored(1.0f).bits, 0x3f80);
  EXPECT_EQ(stored(1.0f + 0x1p-8f).bits, 0x3f80);             // halfway between 1 and 1 + 2^-7: to even
  EXPECT_EQ(stored(1.0f + 0x3p-8f).bits, 0x3f82);             // halfway: up to even
  EXPECT_EQ(stored(1.0f + 0x1p-8f + 0x1p-20f).bits, 0x3f81);  // just above halfway
  EXPECT_EQ(stored(3.4e38f).bits, 0x7f80);                    // beyond the largest: infinity
  EXPECT_EQ(stored(-infinity).bits, 0xff80);
  EXPECT_TRUE(std::isnan(to_float(stored(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(
      to_float(stored(std::bit_cast<float>(0x7f800001u)))));  // a NaN with only low bits must not become infinity
}

TEST(Vec, VectorStoresEqualScalarStores) {
  std::mt19937 engine(1);
  for (int trial = 0; trial < 2000; ++trial) {
    float v[lanes], back[lanes];
    for (float& x : v) x = std::bit_cast<float>(static_cast<std::uint32_t>(engine()));
    bf16 got[lanes];
    store(got, load(v));
    store(back, load(got));
    for (int i = 0; i < lanes; ++i) {
      ASSERT_EQ(got[i].bits, stored(v[i]).bits) << v[i];
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]), std::bit_cast<std::uint32_t>(to_float(got[i])));
    }
  }
}

TEST(Vec, TailsTouchNothingElse) {
  for (std::int64_t n = 1; n < lanes; ++n) {
    float from[lanes], loaded[lanes], to[lanes], marked[lanes];
    for (int i = 0; i < lanes; ++i) from[i] = static_cast<float>(i + 1), to[i] = -1;
    const f16x v = Tail{n}.load(from);
    store(loaded, v);
    Tail{n}.store(to, v);
    store(marked, Tail{n}.or_else(v, 9));
    for (int i = 0; i < lanes; ++i) {
      EXPECT_EQ(loaded[i], i < n ? from[i] : 0);
      EXPECT_EQ(to[i], i < n ? from[i] : -1);
      EXPECT_EQ(marked[i], i < n ? from[i] : 9);
    }
  }
}

TEST(Vec, EachVectorCoversEveryElementOnce) {
  for (const std::int64_t n : {0, 1, 15, 16, 17, 63, 64, 65, 200}) {
    std::vector<int> seen(static_cast<std::size_t>(n + lanes), 0);
    const auto count = [&](std::int64_t i, auto part) {
      std::int64_t width = lanes;
      if constexpr (std::is_same_v<decltype(part), Tail>) width = part.n;
      for (std::int64_t k = 0; k < width; ++k) ++seen[static_cast<std::size_t>(i + k)];
    };
    each_vector(n, count);
    each_vector_of_4(n, [&](std::int64_t i, auto part, int) { count(i, part); });
    for (std::int64_t i = 0; i < n + lanes; ++i)
      EXPECT_EQ(seen[static_cast<std::size_t>(i)], i < n ? 2 : 0) << n << " " << i;
  }
}

TEST(Vec, SumAndMaxOverLanes) {
  float x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = static_cast<float>((i * 7) % 16);
  const f16x v = load(x);
  EXPECT_EQ(sum(v), 120);
  EXPECT_EQ(max(v), 15);
  EXPECT_EQ(max(-v), 0);
}

// e^x over its whole range: 2 units of the last place, 2^-22, about the error of a degree-6 polynomial in float32.
TEST(Vec, ExpAgreesWithTheStandardLibrary) {
  std::mt19937 engine(3);
  std::uniform_real_distribution<float> uniform(-87.2f, 88.6f), small(-1e-3f, 1e-3f);
  for (int trial = 0; trial < 20000; ++trial) {
    float x[lanes], y[lanes];
    for (float& value : x) value = trial % 4 == 0 ? small(engine) : uniform(engine);
    store(y, exp(load(x)));
    for (int i = 0; i < lanes; ++i) {
      const double want = std::exp(static_cast<double>(x[i]));
      ASSERT_LE(std::abs(static_cast<double>(y[i]) - want) / want, 0x1p-22) << x[i];
    }
  }
}

TEST(Vec, ExpAtTheEdges) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const float x[lanes] = {0, -infinity, infinity, -100, 100, nan, -0.0f, 1e30f, -1e30f};
  float y[lanes];
  store(y, exp(load(x)));
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], infinity);
  EXPECT_EQ(y[3], 0);
  EXPECT_EQ(y[4], infinity);
  EXPECT_TRUE(std::isnan(y[5]));
  EXPECT_EQ(y[6], 1);
  EXPECT_EQ(y[7], infinity);
  EXPECT_EQ(y[8], 0);
}

}  // namespace
}  // namespace onescale::cpu

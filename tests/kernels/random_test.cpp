// Normal numbers: the definition, the moments, and independence from how they are asked for.
#include <numbers>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class RandomNormal : public Float32Contract {};
FLOAT32_CONTRACT_SUITE(RandomNormal);

Values draw(Device& device, std::int64_t n, std::uint64_t seed, std::int64_t tensor, std::int64_t first,
            float stddev = 1) {
  const Tensor t = garbage(device, DType::float32, {n});
  device.random_normal(t, seed, tensor, first, stddev);
  return get(device, t);
}

// Box and Muller (1958) on the words of one draw, the first pair for two elements, the second for the next two.
double expected(std::uint64_t seed, std::uint32_t tensor, std::int64_t index) {
  const auto group = static_cast<std::uint64_t>(index / 4);
  const Philox w =
      philox({static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32), tensor, 0}, seed);
  const std::size_t pair = static_cast<std::size_t>(index % 4 / 2 * 2);
  const double radius = std::sqrt(-2 * std::log((w[pair] + 0.5) / 4294967296.0)),
               angle = 2 * std::numbers::pi * w[pair + 1] / 4294967296.0;
  return index % 2 == 0 ? radius * std::cos(angle) : radius * std::sin(angle);
}

TEST_P(RandomNormal, IsAFunctionOfSeedTensorAndIndex) {
  const auto device = make(2, false);
  for (const std::int64_t first :
       {std::int64_t{0}, std::int64_t{3}, (std::int64_t{1} << 34) - 2}) {  // the last crosses into the high word
    const Values got = draw(*device, 11, 0x123456789abcdef0, 5, first, 0.02f);
    for (std::int64_t i = 0; i < 11; ++i) {
      EXPECT_NEAR(got[static_cast<std::size_t>(i)], 0.02f * expected(0x123456789abcdef0, 5, first + i), 1e-8)
          << first << " " << i;
    }
  }
}

TEST_P(RandomNormal, AnySliceAndAnyThreadsGiveTheSameBits) {
  const auto one = make(1, false);
  const Values whole = draw(*one, 1001, 7, 3, 0);
  for (int threads = 2; threads <= 3; ++threads) {
    const auto device = make(threads, false);
    EXPECT_EQ(draw(*device, 1001, 7, 3, 0), whole);
    for (const std::int64_t cut : {1, 2, 3, 4, 500, 999}) {
      Values parts = draw(*device, cut, 7, 3, 0);
      const Values rest = draw(*device, 1001 - cut, 7, 3, cut);
      parts.insert(parts.end(), rest.begin(), rest.end());
      EXPECT_EQ(parts, whole) << cut;
    }
  }
}

// Of n = 2^18 normal numbers the mean has a standard deviation of 1/sqrt(n), the variance sqrt(2/n), the fourth moment
// sqrt(96/n), the correlation of neighbours 1/sqrt(n); five of them are allowed.
TEST_P(RandomNormal, HasTheMomentsOfANormal) {
  const auto device = make(2, false);
  const std::int64_t n = 1 << 18;
  const Values z = draw(*device, n, 1, 2, 0), other_seed = draw(*device, n, 2, 2, 0),
               other_tensor = draw(*device, n, 1, 3, 0);
  double mean = 0, square = 0, cube = 0, fourth = 0, neighbour = 0;
  for (std::size_t i = 0; i < z.size(); ++i) {
    mean += z[i];
    square += z[i] * z[i];
    cube += z[i] * z[i] * z[i];
    fourth += z[i] * z[i] * z[i] * z[i];
    neighbour += z[i] * z[(i + 1) % z.size()];
  }
  const double unit = 5 / std::sqrt(static_cast<double>(n)), count = static_cast<double>(n);
  EXPECT_NEAR(mean / count, 0, unit);
  EXPECT_NEAR(square / count, 1, unit * std::sqrt(2.0));
  EXPECT_NEAR(cube / count, 0, unit * std::sqrt(15.0));
  EXPECT_NEAR(fourth / count, 3, unit * std::sqrt(96.0));
  EXPECT_NEAR(neighbour / count, 0, unit);
  EXPECT_NEAR(dot(z, other_seed) / count, 0, unit);
  EXPECT_NEAR(dot(z, other_tensor) / count, 0, unit);
}

TEST_P(RandomNormal, RefusesOtherTypes) {
  const auto device = make(1, false);
  const Tensor t = device->allocate(Kind::workspace, DType::bfloat16, {4});
  EXPECT_EQ(sentence([&] { device->random_normal(t, 1, 1, 0, 1); }),
            "random_normal: dst is bfloat16 [4], expected 4 contiguous elements of float32");
  EXPECT_NE(
      sentence([&] { device->random_normal(device->allocate(Kind::workspace, DType::float32, {4}), 1, 1, -1, 1); }),
      "");
}

}  // namespace
}  // namespace onescale::contract

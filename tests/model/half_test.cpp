#include "model/half.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace onescale {
namespace {

// The value of a 16-bit pattern by the definition of the format: sign, exponent of `exponent_bits` bits, fraction.
double value_of(std::uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

// The nearest pattern of a positive number, ties to the even one. Infinity stands where the next power of two would be.
std::uint16_t nearest(double x, const std::vector<double>& values) {
  const auto above = std::lower_bound(values.begin(), values.end(), x);
  if (above == values.begin()) return 0;
  if (above == values.end()) return static_cast<std::uint16_t>(values.size() - 1);
  const auto index = static_cast<std::size_t>(above - values.begin());
  const double up = values[index] - x, down = x - values[index - 1];
  return static_cast<std::uint16_t>(up < down || (up == down && index % 2 == 0) ? index : index - 1);
}

struct Format {
  int exponent_bits;
  float (*to_float)(std::uint16_t);
  std::uint16_t (*from_float)(float);  // null: only read
  std::uint16_t infinity;
};

class SixteenBits : public testing::TestWithParam<Format> {};

TEST_P(SixteenBits, EveryPatternIsExactAndComesBack) {
  const Format f = GetParam();
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = f.to_float(bits);
    if ((bits & 0x7fff) > f.infinity) {
      EXPECT_TRUE(std::isnan(value) && (!f.from_float || std::isnan(f.to_float(f.from_float(value))))) << i;
      continue;
    }
    if ((bits & 0x7fff) == f.infinity) {
      ASSERT_EQ(value, (bits & 0x8000 ? -1 : 1) * std::numeric_limits<float>::infinity());
    } else {
      ASSERT_EQ(static_cast<double>(value), value_of(bits, f.exponent_bits)) << i;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0);
    }
    if (f.from_float) {
      ASSERT_EQ(f.from_float(value), bits);
    }
  }
}

TEST(Bfloat16, FloatsRoundToTheNearestTiesToEven) {
  const Format f{8, float_of_bfloat16, bfloat16_of_float, 0x7f80};
  std::vector<double> values;
  for (std::uint32_t i = 0; i <= f.infinity; ++i)
    values.push_back(value_of(static_cast<std::uint16_t>(i), f.exponent_bits));
  auto expect_nearest = [&](float x) {
    if (!std::isfinite(x)) return;
    const std::uint16_t want = nearest(static_cast<double>(x), values);
    ASSERT_EQ(f.from_float(x), want) << std::hexfloat << x;
    ASSERT_EQ(f.from_float(-x), want | 0x8000) << std::hexfloat << x;
  };
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {  // around every value and every midpoint
    for (double x : {values[i], (values[i] + values[i + 1]) / 2}) {
      const auto center = static_cast<float>(x);
      expect_nearest(center);
      expect_nearest(std::nextafter(center, std::numeric_limits<float>::infinity()));
      if (center > 0) expect_nearest(std::nextafter(center, 0.0f));
    }
  }
  expect_nearest(std::numeric_limits<float>::denorm_min());
  expect_nearest(std::numeric_limits<float>::max());
  EXPECT_EQ(f.from_float(std::numeric_limits<float>::infinity()), f.infinity);
  EXPECT_EQ(f.from_float(-std::numeric_limits<float>::infinity()), f.infinity | 0x8000);
  for (std::uint32_t nan : {0x7fc00000u, 0x7f800001u, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(f.to_float(f.from_float(std::bit_cast<float>(nan)))));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, SixteenBits,
                         testing::Values(Format{5, float_of_half, nullptr, 0x7c00},
                                         Format{8, float_of_bfloat16, bfloat16_of_float, 0x7f80}));

}  // namespace
}  // namespace onescale

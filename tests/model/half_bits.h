// float16, which the program only reads, written by its definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace onescale {

// The bits of the nearest float16, ties to even, of a number below 2^16.
inline std::uint16_t half_bits(float x) {
  const int exponent = std::max(std::ilogb(x), -14);
  const long fraction = std::lrint(std::ldexp(std::abs(static_cast<double>(x)), 10 - exponent));
  return static_cast<std::uint16_t>((std::signbit(x) ? 0x8000 : 0) + ((exponent + 14) << 10) + fraction);
}

}  // namespace onescale

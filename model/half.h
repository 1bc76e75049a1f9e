// The two 16-bit formats of model files as bit patterns: float16 (IEEE binary16), which is only read, and bfloat16. To
// float is exact; from float rounds to nearest even. A NaN stays one.
#pragma once

#include <bit>
#include <cstdint>

namespace onescale {

inline float float_of_half(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 0x1f, fraction = h & 0x3ff;
  if (exponent == 0) {  // zero and subnormals: multiples of 2^-24
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  }
  return std::bit_cast<float>(sign | (exponent == 31 ? 0xff : exponent + 112) << 23 | fraction << 13);
}

inline float float_of_bfloat16(std::uint16_t b) {
  return std::bit_cast<float>(std::uint32_t{b} << 16);
}

inline std::uint16_t bfloat16_of_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace onescale

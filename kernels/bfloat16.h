// bfloat16 is a storage type: arithmetic is float32, a store rounds to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace onescale {

struct bf16 {
  std::uint16_t bits;
};

// What a storage type holds as a float, and the way back.
[[gnu::always_inline]] inline float to_float(float x) {
  return x;
}
[[gnu::always_inline]] inline float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
[[gnu::always_inline]] inline void put(float& out, float x) {
  out = x;
}
[[gnu::always_inline]] inline void put(bf16& out, float x) {  // a NaN stays one
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<std::uint16_t>(nan ? (bits >> 16 | 0x40u) : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace onescale

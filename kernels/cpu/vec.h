// Sixteen floats as one value. The compiler maps it to one 512-bit or two 256-bit registers; lanes and their order are
// the same on every machine, so a sum over lanes is too.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/tensor.h"

namespace onescale::cpu::inline ONESCALE_ISA {

inline constexpr std::int64_t lanes = 16;
#if defined(__AVX512F__)
inline constexpr int register_bytes = 64;
#else
inline constexpr int register_bytes = 32;
#endif
typedef float f16x __attribute__((vector_size(64)));
typedef std::int32_t i16x __attribute__((vector_size(64)));
typedef std::uint32_t u16x __attribute__((vector_size(64)));
typedef std::uint16_t h16x __attribute__((vector_size(32)));
typedef double d16x __attribute__((vector_size(128)));
inline constexpr i16x lane_order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;

[[gnu::always_inline]] inline f16x splat(float x) {
  return x - f16x{};
}
[[gnu::always_inline]] inline u16x splat(std::uint32_t x) {
  return x - u16x{};
}

// Sixteen 16-bit lanes to 32 bits and back. One instruction, for which the general conversion takes several.
[[gnu::always_inline]] inline u16x widen(h16x h) {
#if defined(__AVX512F__)
  return std::bit_cast<u16x>(_mm512_maskz_cvtepu16_epi32(0xffff, std::bit_cast<__m256i>(h)));
#else
  return __builtin_convertvector(h, u16x);
#endif
}
[[gnu::always_inline]] inline h16x narrow(u16x v) {
#if defined(__AVX512F__)
  return std::bit_cast<h16x>(_mm512_maskz_cvtepi32_epi16(0xffff, std::bit_cast<__m512i>(v)));
#else
  return __builtin_convertvector(v, h16x);
#endif
}

[[gnu::always_inline]] inline f16x load(const float* p) {
  f16x v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
[[gnu::always_inline]] inline f16x load(const bf16* p) {
  h16x h;
  std::memcpy(&h, p, sizeof h);
  return std::bit_cast<f16x>(widen(h) << 16);
}
[[gnu::always_inline]] inline void store(float* p, f16x v) {
  std::memcpy(p, &v, sizeof v);
}
[[gnu::always_inline]] inline void store(bf16* p, f16x v) {
  const u16x bits = std::bit_cast<u16x>(v);
  const h16x h = narrow((v != v ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  std::memcpy(p, &h, sizeof h);
}

[[gnu::always_inline]] inline f16x select(i16x mask, f16x yes, f16x no) {
  return mask ? yes : no;
}
[[gnu::always_inline]] inline f16x max(f16x a, f16x b) {
  return a > b ? a : b;
}
[[gnu::always_inline]] inline f16x min(f16x a, f16x b) {
  return a < b ? a : b;
}

// The lanes combined pairwise, always in the same order: 8 apart, then 4, 2, 1.
template <class Combine>
[[gnu::always_inline]] inline float over_lanes(f16x v, Combine combine) {
  typedef float f8x __attribute__((vector_size(32)));
  typedef float f4x __attribute__((vector_size(16)));
  struct Eights {
    f8x a, b;
  };
  struct Fours {
    f4x a, b;
  };
  const auto [a, b] = std::bit_cast<Eights>(v);
  const auto [c, d] = std::bit_cast<Fours>(combine(a, b));
  const f4x four = combine(c, d);
  const f4x two = combine(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return combine(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}
[[gnu::always_inline]] inline float sum(f16x v) {
  return over_lanes(
      v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
[[gnu::always_inline]] inline float max(f16x v) {
  return over_lanes(
      v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// The polynomial in x with these coefficients, the highest first.
template <class... Float>
[[gnu::always_inline]] inline f16x polynomial(f16x x, float highest, Float... others) {
  f16x p = splat(highest);
  ((p = p * x + splat(others)), ...);
  return p;
}

// e^r * 2^n for |r| <= ln(2)/2 to 1 ulp; n is the low bits of t and the result is a normal number. The coefficients
// minimise the largest relative error of degree 6; the first two are exact.
[[gnu::always_inline]] inline f16x exp_reduced(f16x r, f16x t) {
  const f16x p = polynomial(r, 1.381454e-3f, 8.368745e-3f, 4.166839e-2f, 0.16666521f, 0.49999994f, 1.0f, 1.0f);
  return std::bit_cast<f16x>(std::bit_cast<u16x>(p) + (std::bit_cast<u16x>(t) << 23));
}
inline constexpr float to_integer = 12582912.0f;  // x + to_integer holds in its low bits the integer nearest to x

// 2^x for x below 127; 0 below -126, NaN stays.
[[gnu::always_inline]] inline f16x exp2(f16x x) {
  const f16x t = x + splat(to_integer);
  return select(x < splat(-126.0f), f16x{}, exp_reduced((x - (t - splat(to_integer))) * splat(ln_2), t));
}

// e^x to about 1 ulp (Cody and Waite reduction); 0 below -87.3, infinity above 88.7, NaN stays.
[[gnu::always_inline]] inline f16x exp(f16x x) {
  const f16x t = x * splat(log2_e) + splat(to_integer);
  const f16x n = t - splat(to_integer);
  f16x y = exp_reduced((x - n * splat(0.693145752f)) - n * splat(1.42860677e-6f), t);
  y = select(x < splat(-87.3f), f16x{}, y);
  y = select(x > splat(88.72f), splat(__builtin_inff()), y);
  return select(x != x, x, y);
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

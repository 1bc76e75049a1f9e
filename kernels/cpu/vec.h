// Sixteen numbers as one value, in as many registers as they need. The lanes and their order are the same at every
// level, so a sum over lanes is too.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/tensor.h"

namespace onescale::cpu::inline ONESCALE_ISA {

inline constexpr std::int64_t lanes = 16;
#if defined(__AVX512F__)
inline constexpr int register_bytes = 64;
#else
inline constexpr int register_bytes = 32;
#endif
inline constexpr int width = register_bytes / 4;
typedef float vec __attribute__((vector_size(register_bytes)));
typedef std::uint32_t uvec __attribute__((vector_size(register_bytes)));

// Not one vector of 64 bytes: GCC 12 takes comparisons, choices, conversions and moves of what is wider than a register
// apart into single lanes, at several times the cost of the arithmetic around them.
template <class T>
struct Sixteen {
  typedef T Register __attribute__((vector_size(register_bytes)));
  static constexpr int count = lanes * sizeof(T) / register_bytes;
  Register part[count];
};
using f16x = Sixteen<float>;
using i16x = Sixteen<std::int32_t>;
using u16x = Sixteen<std::uint32_t>;
using d16x = Sixteen<double>;
typedef std::uint16_t h16x __attribute__((vector_size(32)));
inline constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;

// op on the registers of v.
template <class Result, class Op, class... V>
[[gnu::always_inline]] inline Result each_register(Op op, const V&... v) {
  Result result;
#pragma GCC unroll 4
  for (int i = 0; i < Result::count; ++i) result.part[i] = op(v.part[i]...);
  return result;
}
#define ONESCALE_LANEWISE(op)                                                                      \
  template <class T>                                                                               \
  [[gnu::always_inline]] inline Sixteen<T> operator op(const Sixteen<T>& a, const Sixteen<T>& b) { \
    return each_register<Sixteen<T>>(                                                              \
        [](auto x, auto y) __attribute__((always_inline)) { return x op y; }, a, b);               \
  }
ONESCALE_LANEWISE(+)
ONESCALE_LANEWISE(-)
ONESCALE_LANEWISE(*)
ONESCALE_LANEWISE(/)
ONESCALE_LANEWISE(&)
ONESCALE_LANEWISE(|)
#undef ONESCALE_LANEWISE
template <class T>
[[gnu::always_inline]] inline Sixteen<T>& operator+=(Sixteen<T>& a, const Sixteen<T>& b) {
  return a = a + b;
}
template <class T>
[[gnu::always_inline]] inline Sixteen<T>& operator*=(Sixteen<T>& a, const Sixteen<T>& b) {
  return a = a * b;
}
template <class T>
[[gnu::always_inline]] inline Sixteen<T> operator-(const Sixteen<T>& a) {
  return each_register<Sixteen<T>>(
      [](auto x) __attribute__((always_inline)) { return -x; }, a);
}
template <class T>
[[gnu::always_inline]] inline Sixteen<T> operator~(const Sixteen<T>& a) {
  return each_register<Sixteen<T>>(
      [](auto x) __attribute__((always_inline)) { return ~x; }, a);
}
template <class T>
[[gnu::always_inline]] inline Sixteen<T> operator<<(const Sixteen<T>& a, int n) {
  return each_register<Sixteen<T>>(
      [n](auto x) __attribute__((always_inline)) { return x << n; }, a);
}
template <class T>
[[gnu::always_inline]] inline Sixteen<T> operator>>(const Sixteen<T>& a, int n) {
  return each_register<Sixteen<T>>(
      [n](auto x) __attribute__((always_inline)) { return x >> n; }, a);
}

// All lanes x.
template <class T>
[[gnu::always_inline]] inline Sixteen<T> splat(T x) {
  return each_register<Sixteen<T>>(
      [x](auto zeros) __attribute__((always_inline)) { return x - zeros; }, Sixteen<T>{});
}
// The same bits as lanes of another type.
template <class To, class From>
[[gnu::always_inline]] inline To as(const From& v) {
  return each_register<To>(
      [](auto x) __attribute__((always_inline)) { return std::bit_cast<typename To::Register>(x); }, v);
}
// Masks: in each lane all bits or none.
template <class T>
[[gnu::always_inline]] inline i16x less(const Sixteen<T>& a, const Sixteen<T>& b) {
  return each_register<i16x>(
      [](auto x, auto y) __attribute__((always_inline)) { return x < y; }, a, b);
}
[[gnu::always_inline]] inline i16x is_nan(const f16x& v) {
  return each_register<i16x>(
      [](auto x) __attribute__((always_inline)) { return x != x; }, v);
}
template <class T>
[[gnu::always_inline]] inline Sixteen<T> select(const i16x& mask, const Sixteen<T>& yes, const Sixteen<T>& no) {
  return each_register<Sixteen<T>>(
      [](auto m, auto y, auto n) __attribute__((always_inline)) { return m ? y : n; }, mask, yes, no);
}
[[gnu::always_inline]] inline f16x max(const f16x& a, const f16x& b) {
  return each_register<f16x>(
      [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; }, a, b);
}
[[gnu::always_inline]] inline f16x min(const f16x& a, const f16x& b) {
  return each_register<f16x>(
      [](auto x, auto y) __attribute__((always_inline)) { return x < y ? x : y; }, a, b);
}

// Sixteen 16-bit lanes to 32 bits and back. One instruction, for which the general conversion takes several.
[[gnu::always_inline]] inline u16x widen(h16x h) {
#if defined(__AVX512F__)
  return {{std::bit_cast<uvec>(_mm512_maskz_cvtepu16_epi32(0xffff, std::bit_cast<__m256i>(h)))}};
#else
  const __m256i all = std::bit_cast<__m256i>(h);
  return {{std::bit_cast<uvec>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all))),
           std::bit_cast<uvec>(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1)))}};
#endif
}
[[gnu::always_inline]] inline h16x narrow(const u16x& v) {
#if defined(__AVX512F__)
  return std::bit_cast<h16x>(_mm512_maskz_cvtepi32_epi16(0xffff, std::bit_cast<__m512i>(v.part[0])));
#else
  const __m256i mixed =  // lanes 0-3, 8-11, 4-7, 12-15
      _mm256_packus_epi32(std::bit_cast<__m256i>(v.part[0]), std::bit_cast<__m256i>(v.part[1]));
  return std::bit_cast<h16x>(_mm256_permute4x64_epi64(mixed, 0b11011000));
#endif
}
// Half of a register.
template <int half, class V, int... l>
[[gnu::always_inline]] inline auto half_of(V v, std::integer_sequence<int, l...> /*lanes*/) {
  return __builtin_shufflevector(v, v, (l + half * static_cast<int>(sizeof...(l)))...);
}
template <int half, class V>
[[gnu::always_inline]] inline auto half_of(V v) {
  return half_of<half>(v, std::make_integer_sequence<int, sizeof v / sizeof v[0] / 2>());
}
[[gnu::always_inline]] inline d16x to_double(const f16x& v) {
  d16x result;
  for (int i = 0; i < v.count; ++i) {
    result.part[2 * i] = __builtin_convertvector(half_of<0>(v.part[i]), d16x::Register);
    result.part[2 * i + 1] = __builtin_convertvector(half_of<1>(v.part[i]), d16x::Register);
  }
  return result;
}

template <class T>
[[gnu::always_inline]] inline Sixteen<T> load(const T* p) {
  Sixteen<T> v;
  for (int i = 0; i < v.count; ++i) std::memcpy(&v.part[i], p + i * (lanes / v.count), sizeof v.part[i]);
  return v;
}
[[gnu::always_inline]] inline f16x load(const bf16* p) {
  h16x h;
  std::memcpy(&h, p, sizeof h);
  return as<f16x>(widen(h) << 16);
}
template <class T>
[[gnu::always_inline]] inline void store(T* p, const Sixteen<T>& v) {
  for (int i = 0; i < v.count; ++i) std::memcpy(p + i * (lanes / v.count), &v.part[i], sizeof v.part[i]);
}
[[gnu::always_inline]] inline void store(bf16* p, const f16x& v) {
  const u16x bits = as<u16x>(v);
  const u16x nearest = bits + splat(0x7fffu) + (bits >> 16 & splat(1u));
  const h16x h = narrow(select(is_nan(v), bits | splat(0x400000u), nearest) >> 16);
  std::memcpy(p, &h, sizeof h);
}
inline constexpr std::int32_t lane_order[lanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The lanes combined pairwise, always in the same order: 8 apart, then 4, 2, 1.
template <class Combine>
[[gnu::always_inline]] inline float over_lanes(const f16x& v, Combine combine) {
  const auto eight = [&] {
    if constexpr (f16x::count == 1)
      return combine(half_of<0>(v.part[0]), half_of<1>(v.part[0]));
    else
      return combine(v.part[0], v.part[1]);
  }();
  const auto four = combine(half_of<0>(eight), half_of<1>(eight));
  const auto two = combine(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return combine(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}
[[gnu::always_inline]] inline float sum(const f16x& v) {
  return over_lanes(
      v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
[[gnu::always_inline]] inline float max(const f16x& v) {
  return over_lanes(
      v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// The polynomial in x with these coefficients, the highest first.
template <class... Float>
[[gnu::always_inline]] inline f16x polynomial(const f16x& x, float highest, Float... others) {
  f16x p = splat(highest);
  ((p = p * x + splat(others)), ...);
  return p;
}

// e^r * 2^n for |r| <= ln(2)/2 to 1 ulp; n is the low bits of t and the result is a normal number. The coefficients
// minimise the largest relative error of degree 6; the first two are exact.
[[gnu::always_inline]] inline f16x exp_reduced(const f16x& r, const f16x& t) {
  const f16x p = polynomial(r, 1.381454e-3f, 8.368745e-3f, 4.166839e-2f, 0.16666521f, 0.49999994f, 1.0f, 1.0f);
  return as<f16x>(as<u16x>(p) + (as<u16x>(t) << 23));
}
inline constexpr float to_integer = 12582912.0f;  // x + to_integer holds in its low bits the integer nearest to x

// 2^x for x below 127; 0 below -126, NaN stays.
[[gnu::always_inline]] inline f16x exp2(const f16x& x) {
  const f16x t = x + splat(to_integer);
  return select(less(x, splat(-126.0f)), f16x{}, exp_reduced((x - (t - splat(to_integer))) * splat(ln_2), t));
}

// e^x to about 1 ulp (Cody and Waite reduction); 0 below -87.3, infinity above 88.7, NaN stays.
[[gnu::always_inline]] inline f16x exp(const f16x& x) {
  const f16x t = x * splat(log2_e) + splat(to_integer);
  const f16x n = t - splat(to_integer);
  f16x y = exp_reduced((x - n * splat(0.693145752f)) - n * splat(1.42860677e-6f), t);
  y = select(less(x, splat(-87.3f)), f16x{}, y);
  y = select(less(splat(88.72f), x), splat(__builtin_inff()), y);
  return select(is_nan(x), x, y);
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

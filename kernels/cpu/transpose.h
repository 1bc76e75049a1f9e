// Vectors of one register, and their transposition by exchanges between pairs of them.
#pragma once

#include <utility>

#include "kernels/cpu/vec.h"

namespace onescale::cpu::inline ONESCALE_ISA {

[[gnu::always_inline]] inline vec get(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
[[gnu::always_inline]] inline void set(float* p, vec v) {
  std::memcpy(p, &v, sizeof v);
}

// Lane l of the result is lane index(l) + shift of a and b, put one after the other.
template <int index(int), int shift, class V, int... l>
[[gnu::always_inline]] inline V shuffle(V a, V b, std::integer_sequence<int, l...> /*lanes*/) {
  return __builtin_shufflevector(a, b, (index(l) + shift)...);
}
template <int index(int), int shift, class V>
[[gnu::always_inline]] inline V shuffle(V a, V b) {
  return shuffle<index, shift>(a, b, std::make_integer_sequence<int, width>());
}
// Elements, or pairs of them, of the two vectors alternately, within quarters of a register; even quarters of one and
// of the other.
constexpr int singles(int l) {
  return l / 4 * 4 + l % 4 / 2 + l % 2 * width;
}
constexpr int pairs(int l) {
  return l / 4 * 4 + l % 2 + l % 4 / 2 * width;
}
constexpr int quarters(int l) {
  return l % (width / 2) / 4 * 8 + l % 4 + l / (width / 2) * width;
}

// Four vectors of 32-bit lanes: within each quarter lane j of v[i] becomes lane i of v[j].
template <class V>
[[gnu::always_inline]] inline void transpose_quarters(V* v) {
  const V a = shuffle<singles, 0>(v[0], v[1]), b = shuffle<singles, 0>(v[2], v[3]);
  const V c = shuffle<singles, 2>(v[0], v[1]), d = shuffle<singles, 2>(v[2], v[3]);
  v[0] = shuffle<pairs, 0>(a, b), v[1] = shuffle<pairs, 2>(a, b);
  v[2] = shuffle<pairs, 0>(c, d), v[3] = shuffle<pairs, 2>(c, d);
}

// Lane j of v[i] becomes lane i of v[j]: first within quarters, after which quarter q of v[4 g + j] is column 4 q + j
// of the rows 4 g .. 4 g + 3. Then an exchange of neighbouring g with one bit of q, after which that bit of g is the
// highest, once for each bit.
[[gnu::always_inline]] inline void transpose(vec (&v)[width]) {
#pragma GCC unroll 4
  for (int i = 0; i < width; i += 4) transpose_quarters(v + i);
#pragma GCC unroll 2
  for (int done = 4; done < width; done *= 2) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      constexpr int half = width / 8;
      vec t[2 * half];
#pragma GCC unroll 2
      for (int g = 0; g < half; ++g) {
        t[g] = shuffle<quarters, 0>(v[8 * g + j], v[8 * g + 4 + j]);
        t[g + half] = shuffle<quarters, 4>(v[8 * g + j], v[8 * g + 4 + j]);
      }
#pragma GCC unroll 4
      for (int g = 0; g < 2 * half; ++g) v[4 * g + j] = t[g];
    }
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

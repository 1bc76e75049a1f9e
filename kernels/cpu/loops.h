// The loops over a row, or over a whole tensor, in vectors, and the choice of a storage type.
#pragma once

#include <algorithm>

#include "kernels/cpu/vec.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// How a vector of a row is read and written: all lanes, or the first n of the last one; the others load as 0 and are
// not stored.
struct Whole {
  template <class T>
  [[gnu::always_inline]] f16x load(const T* p) const {
    return cpu::load(p);
  }
  template <class T>
  [[gnu::always_inline]] void store(T* p, f16x v) const {
    cpu::store(p, v);
  }
  [[gnu::always_inline]] f16x or_else(f16x v, float) const { return v; }
};
struct Tail {
  std::int64_t n;
  template <class T>
  [[gnu::always_inline]] f16x load(const T* p) const {
    T buffer[lanes] = {};
    std::memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(T));
    return cpu::load(buffer);
  }
  template <class T>
  [[gnu::always_inline]] void store(T* p, f16x v) const {
    T buffer[lanes];
    cpu::store(buffer, v);
    std::memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(T));
  }
  [[gnu::always_inline]] f16x or_else(f16x v,
                                      float missing) const {  // v, with another value in the lanes that do not exist
    return select(less(cpu::load(lane_order), splat(static_cast<std::int32_t>(n))), v, splat(missing));
  }
};

// body(i, part) for i = 0, 16, 32 ... below n; part is Whole or Tail.
template <class Body>
inline void each_vector(std::int64_t n, Body&& body) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, Whole{});
  if (i < n) body(i, Tail{n - i});
}

// body(begin, end) for pieces of n elements, by several threads.
template <class Body>
void each_piece(std::int64_t n, int threads, const Body& body) {
  constexpr std::int64_t piece = std::int64_t{1} << 12;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t begin = 0; begin < n; begin += piece) body(begin, std::min(n, begin + piece));
}

inline void zero(char* p, std::int64_t bytes, int threads) {
  each_piece(bytes, threads, [=](std::int64_t begin, std::int64_t end) {
    std::memset(p + begin, 0, static_cast<std::size_t>(end - begin));
  });
}

// each_vector() by several threads.
template <class Body>
void each_vector(std::int64_t n, int threads, const Body& body) {
  each_piece(n, threads, [&](std::int64_t begin, std::int64_t end) {
    each_vector(end - begin, [&](std::int64_t i, auto part) { body(begin + i, part); });
  });
}

// each_vector() with a third argument 0 .. 3 that says which of four accumulators a vector belongs to: a single one
// would wait for each addition.
template <class Body>
inline void each_vector_of_4(std::int64_t n, Body&& body) {
  std::int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    body(i, Whole{}, 0);
    body(i + lanes, Whole{}, 1);
    body(i + 2 * lanes, Whole{}, 2);
    body(i + 3 * lanes, Whole{}, 3);
  }
  each_vector(n - i, [&](std::int64_t j, auto part) { body(i + j, part, 0); });
}

// body(float{}) or body(bf16{}), by the storage type of an activation.
template <class Body>
void with_storage(DType dtype, Body&& body) {
  if (dtype == DType::bfloat16) {
    body(bf16{});
  } else {
    body(float{});
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

// The loop over a row in vectors, and the choice of a storage type.
#pragma once

#include "kernels/cpu/vec.h"
#include "kernels/error.h"

namespace onescale::cpu {

// How a vector of a row is read and written: all lanes, or the first n of the last one.
struct Whole {
  template <class T>
  f16x load(const T* p) const {
    return cpu::load(p);
  }
  template <class T>
  void store(T* p, f16x v) const {
    cpu::store(p, v);
  }
  f16x or_else(f16x v, float) const { return v; }
};
struct Tail {
  std::int64_t n;
  template <class T>
  f16x load(const T* p) const {
    return load_tail(p, n);
  }
  template <class T>
  void store(T* p, f16x v) const {
    store_tail(p, v, n);
  }
  f16x or_else(f16x v, float missing) const {  // v, with another value in the lanes that do not exist
    constexpr i16x lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return select(lane < static_cast<std::int32_t>(n), v, splat(missing));
  }
};

// body(i, part) for i = 0, 16, 32 ... below n; part is Whole or Tail. Lanes that do not exist are read as 0.
template <class Body>
inline void each_vector(std::int64_t n, Body&& body) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, Whole{});
  if (i < n) body(i, Tail{n - i});
}

// The same with a third argument 0 .. 3 that says which of four accumulators a vector belongs to: a single one would
// wait for each addition.
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

}  // namespace onescale::cpu

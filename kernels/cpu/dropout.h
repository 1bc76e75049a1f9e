// Dropout of the features of a token, in vectors; the key of an element is said in kernels/philox.h.
#pragma once

#include "kernels/arguments.h"
#include "kernels/cpu/vec_philox.h"
#include "kernels/device.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// Keeps or drops the elements of one token after another. at(i, v) takes features i to i + 15 and is called for i = 0,
// 16, 32 ...
class TokenDropout {
 public:
  explicit TokenDropout(const Dropout& d) : d_(d), threshold_(drop_threshold(d.p)), scale_(1 / (1 - d.p)) {}

  void start(std::int64_t token) {
    const Philox first = dropout_counter(d_.site, d_.layer, d_.step, d_.first_row + token / d_.positions.dim(1),
                                         d_.positions.as<std::int32_t>()[token], 0);
    counter_[0] = load(group_order);
    for (std::size_t word = 1; word < 4; ++word) counter_[word] = splat(first[word]);
  }
  [[gnu::always_inline]] f16x at(std::int64_t i, f16x v) {
    const std::int64_t part = i / lanes % 4;
    if (part == 0) {
      words_ = by_element(philox16(counter_, d_.seed));
      counter_[0] += splat(16u);
    }
    return select(less(words_.w[part], splat(threshold_)), f16x{}, v * splat(scale_));
  }

 private:
  const Dropout& d_;
  std::uint32_t threshold_;
  float scale_;
  u16x counter_[4] = {};
  Philox16 words_ = {};
};

struct NoDropout {
  void start(std::int64_t) {}
  [[gnu::always_inline]] f16x at(std::int64_t, f16x v) { return v; }
};

// body(TokenDropout) or, without cost, body(NoDropout).
template <class Body>
void with_dropout(const Dropout& d, Body&& body) {
  if (d.p > 0) {
    body(TokenDropout(d));
  } else {
    body(NoDropout{});
  }
}

// body(token, drop) for n tokens by several threads.
template <class Body>
void each_token(std::int64_t n, const Dropout& d, int threads, const Body& body) {
  with_dropout(d, [&](auto drop) {
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(drop)
    for (std::int64_t token = 0; token < n; ++token) {
      drop.start(token);
      body(token, drop);
    }
  });
}

// x [B, T, C] may be dropped so.
inline void check_dropout(const char* operation, const Dropout& d, const Tensor& x) {
  check(d.p >= 0 && d.p < 1, operation, ": the dropout probability ", d.p, " must be at least 0 and below 1");
  if (d.p > 0) {
    check(x.rank == 3, operation, ": dropout needs a tensor [B, T, C], not ", x.describe());
    expect(operation, {{"positions", d.positions, DType::int32, {x.dim(0), x.dim(1)}}});
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

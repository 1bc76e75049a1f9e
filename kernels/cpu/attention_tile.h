// What the forward and the backward pass of attention share: the rows of a tile and the keys they see, packing,
// products of tiles in registers, and the draws of dropout. Tiles are float32 whatever the storage type.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vec_philox.h"
#include "kernels/device.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// Keys of a tile. Tiles begin at multiples of it, so that the sixteen draws of one philox16() serve one row of a tile.
inline constexpr std::int64_t key_block = 64;
// A product keeps at most this many rows and registers a row of its result in registers: 24 of 32, or 12 of 16.
inline constexpr std::int64_t register_rows = 6, register_columns = register_bytes == 64 ? 4 : 2;

inline std::int64_t padded(std::int64_t d) {
  return (d + lanes - 1) / lanes * lanes;
}

// Hands out aligned pieces of scratch; without a base it only measures.
struct Arena {
  char* base;
  std::int64_t used = 0;
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t at = used;
    used += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
    return base ? reinterpret_cast<T*>(base + at) : nullptr;
  }
};

// A tensor [B, n, h, d] by (batch row, token, head).
template <class T>
struct HeadView {
  T* data;
  std::int64_t batch, token, head;
  explicit HeadView(const Tensor& t) : data(t.as<T>()), batch(t.stride[0]), token(t.stride[1]), head(t.stride[2]) {}
  T* operator()(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return data + b * batch + i * token + h * head;
  }
};

// Queries of one row of the batch that share a K/V head, folded: row r is query (begin + r) / heads of the head that is
// (begin + r) % heads after first_head.
struct Rows {
  std::int64_t b, kv_head, first_head, heads, begin, count;
  // body(r, query, head) for r in [from, to).
  template <class Body>
  void each(std::int64_t from, std::int64_t to, Body&& body) const {
    std::int64_t query = (begin + from) / heads, head = (begin + from) % heads;
    for (std::int64_t r = from; r < to; ++r) {
      body(r, query, first_head + head);
      if (++head == heads) head = 0, ++query;
    }
  }
};

// The keys that rows see: some row those in [lo, hi), every row those in [all_lo, all_hi).
struct Seen {
  std::int64_t lo = std::numeric_limits<std::int64_t>::max(), hi = 0, all_lo = 0,
               all_hi = std::numeric_limits<std::int64_t>::max();
  void add(const Seen& other) {
    if (other.lo < other.hi) lo = std::min(lo, other.lo), hi = std::max(hi, other.hi);
    all_lo = std::max(all_lo, other.all_lo), all_hi = std::min(all_hi, other.all_hi);
  }
  bool any(std::int64_t begin, std::int64_t end) const { return lo < end && begin < hi; }
  bool all(std::int64_t begin, std::int64_t end) const { return all_lo <= begin && end <= all_hi; }
};

// Which of sixteen keys from `key` on a row sees.
[[gnu::always_inline]] inline i16x visible_lanes(const Seen& row, std::int64_t key) {
  return ~less(load(lane_order), splat(static_cast<std::int32_t>(row.lo - key))) &
         less(load(lane_order), splat(static_cast<std::int32_t>(row.hi - key)));
}

// Fills one entry a row and one a group of register_rows rows, and returns the whole.
inline Seen see(const Visible& visible, std::int64_t n_k, const Rows& rows, Seen* row, Seen* group) {
  const std::int64_t base = rows.b * visible.first.dim(1);
  Seen whole;
  rows.each(0, rows.count, [&](std::int64_t r, std::int64_t i, std::int64_t) {
    const std::int64_t first = visible.first.as<std::int32_t>()[base + i],
                       last = visible.last.as<std::int32_t>()[base + i];
    row[r].lo = row[r].all_lo = std::max<std::int64_t>(first, 0);
    row[r].hi = row[r].all_hi = std::min(last + 1, n_k);
    Seen& g = group[r / register_rows];
    if (r % register_rows == 0) g = Seen{};
    g.add(row[r]);
  });
  for (std::int64_t g = 0; g * register_rows < rows.count; ++g) whole.add(group[g]);
  return whole;
}

// c[r][j] = (add ? c[r][j] : 0) + sum over k of a(r, k) * b[k][j], for R rows and C registers of j.
// a(r, k) is a[r * lda + k], or a[k * lda + r] when Transposed.
template <int R, int C, bool Transposed>
void product_in_registers(std::int64_t k, const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                          std::int64_t ldc, bool add) {
  vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      sum[r][j] = add ? get(c + r * ldc + j * width) : vec{};
    }
  }
  for (; k > 0; --k) {
    vec v[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) v[j] = get(b + j * width);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vec u = (Transposed ? a[r] : a[r * lda]) - vec{};
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sum[r][j] += u * v[j];
    }
    a += Transposed ? lda : 1;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) set(c + r * ldc + j * width, sum[r][j]);
  }
}

// The same for any number of rows and a multiple of 16 columns.
template <bool Transposed>
void product(std::int64_t rows, std::int64_t columns, std::int64_t k, const float* a, std::int64_t lda, const float* b,
             std::int64_t ldb, float* c, std::int64_t ldc, bool add) {
  using Product =
      void (*)(std::int64_t, const float*, std::int64_t, const float*, std::int64_t, float*, std::int64_t, bool);
  static constexpr auto table = []<std::size_t... I>(std::index_sequence<I...>) {
    return std::array<Product, sizeof...(I)>{
        product_in_registers<static_cast<int>(I) / register_columns + 1, static_cast<int>(I) % register_columns + 1,
                             Transposed>...};
  }
  (std::make_index_sequence<register_rows * register_columns>{});
  const std::int64_t all = columns / width, pieces = (all + register_columns - 1) / register_columns;
  const std::int64_t most = pieces <= 1 ? all : (all + pieces - 1) / pieces;  // rather 3 + 2 than 4 + 1
  for (std::int64_t j = 0; j < all; j += most) {
    const std::int64_t wide = std::min(most, all - j);
    for (std::int64_t r = 0; r < rows; r += register_rows) {
      const std::int64_t high = std::min(register_rows, rows - r);
      table[static_cast<std::size_t>((high - 1) * register_columns + wide - 1)](
          k, a + (Transposed ? r : r * lda), lda, b + j * width, ldb, c + r * ldc + j * width, ldc, add);
    }
  }
}

// Rows of a strided tensor lie on pages that the hardware does not foresee; they are fetched while the products before
// them run.
template <class T>
void prefetch(const T* row, std::int64_t d) {
  for (std::int64_t i = 0; i < d; i += 64 / static_cast<std::int64_t>(sizeof(T))) __builtin_prefetch(row + i, 0, 2);
  asm volatile("");  // a function that only prefetches passes for one without effect and would be left out
}

// Row i of a tile: d features and zeros.
template <class T>
void pack(float* dst, const T* src, std::int64_t d) {
  each_vector(d, [&](std::int64_t i, auto part) { store(dst + i, part.load(src + i)); });
}

// dst[i][r] = row(r)[i] for i < d, r < rows, and 0 for r up to key_block.
template <class RowOf>
void pack_transposed(float* dst, std::int64_t rows, std::int64_t d, RowOf&& row) {
  constexpr std::int64_t n = width;
  for (std::int64_t r = 0; r < key_block; r += n) {
    each_vector(d, [&](std::int64_t i, auto part) {
      f16x from[n];
      for (std::int64_t j = 0; j < n; ++j) from[j] = r + j < rows ? part.load(row(r + j) + i) : f16x{};
      for (std::int64_t at = 0; at < std::min(lanes, d - i); at += n) {
        vec square[n];
        for (std::int64_t j = 0; j < n; ++j) square[j] = from[j].part[at / n];
        transpose(square);
        float* to = dst + (i + at) * key_block + r;
        for (std::int64_t j = 0; j < std::min(n, d - i - at); ++j) set(to + j * key_block, square[j]);
      }
    });
  }
}

// Checks what both passes are given and returns the number of visible (query, head, key) triples; in a dry run, where
// nobody knows them, that of the causal sequence.
double check_attention(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
                       const Visible& visible, const Dropout& dropout);
// `t` has the shape and dtype of `like` and a contiguous last axis.
void check_like(const char* operation, const char* name, const Tensor& t, const Tensor& like);

// The random words of a row of a tile.
class KeyDropout {
 public:
  explicit KeyDropout(const Dropout& d) : d_(d), threshold_(drop_threshold(d.p)) {}
  // Lane l of word j is for key + 16 j + l, where key is a multiple of key_block.
  [[gnu::always_inline]] Philox16 words(std::int64_t b, std::int64_t query, std::int64_t head, std::int64_t key) const {
    const std::int32_t position = d_.positions.as<std::int32_t>()[b * d_.positions.dim(1) + query];
    const Philox first = dropout_counter(d_.site, d_.layer, d_.step, d_.first_row + b, position,
                                         attention_group(d_.first_head + head, key));
    const u16x counter[4] = {splat(first[0]) + load(group_order), splat(first[1]), splat(first[2]), splat(first[3])};
    return by_element(philox16(counter, d_.seed));
  }
  [[gnu::always_inline]] i16x keep(u16x word) const { return ~less(word, splat(threshold_)); }

 private:
  const Dropout& d_;
  std::uint32_t threshold_;
};

}  // namespace onescale::cpu::inline ONESCALE_ISA

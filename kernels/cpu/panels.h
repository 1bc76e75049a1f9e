// Packed operands of a product: their panels.
#pragma once

#include <algorithm>

#include "kernels/cpu/transpose.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// A tile of the result is tile_rows x 2 vectors: as many sums as there are registers, less two for b and one for a.
inline constexpr std::int64_t tile_rows = register_bytes == 64 ? 14 : 6, tile_columns = 2 * width;
typedef std::uint16_t hvec __attribute__((vector_size(width * 2)));

[[gnu::always_inline]] inline vec get(const bf16* p) {
  hvec h;
  std::memcpy(&h, p, sizeof h);
  return std::bit_cast<vec>(__builtin_convertvector(h, uvec) << 16);
}

// How rows or columns are cut into panels. Rows are cut evenly (256 rows: 13 or 14 a panel, no small one at the end),
// columns at multiples of a tile. In a packed panel the lanes of one k lie together.
struct Panels {
  std::int64_t total, lanes, count, size, extra;
  static Panels rows(std::int64_t M) {
    const std::int64_t count = (M + tile_rows - 1) / tile_rows;
    return {M, width, count, M / count, M % count};
  }
  static Panels columns(std::int64_t N) {
    return {N, tile_columns, (N + tile_columns - 1) / tile_columns, tile_columns, 0};
  }
  std::int64_t begin(std::int64_t p) const { return std::min(total, p * size + std::min(p, extra)); }
};

inline constexpr std::int64_t ahead = 32;  // rows of k between the one that is packed and the one that is fetched

// Packs the panels [first, last) over K, one after the other into `out`. Element (i, k) is data[i * row + k * step],
// and one of the two strides is 1. Lanes that are no row of the panel may hold anything: they reach nothing that is
// kept.
template <class T>
void pack(float* out, const Panels& panels, std::int64_t first, std::int64_t last, const T* data, std::int64_t row,
          std::int64_t step, std::int64_t K) {
  const std::int64_t lanes_ = panels.lanes;
  if (row == 1) {
    constexpr std::int64_t rows = 16;  // of k at a time: neighbouring panels share cache lines
    for (std::int64_t k0 = 0; k0 < K; k0 += rows) {
      for (std::int64_t p = first; p < last; ++p) {
        for (std::int64_t v = 0; v < lanes_; v += width) {
          const T* from = data + panels.begin(p) + v;
          float* to = out + (p - first) * K * lanes_ + v;
          const std::int64_t k1 = std::min(K, k0 + rows), readable = panels.total - panels.begin(p) - v;
          for (std::int64_t k = k0; k < k1; ++k) {
            if (readable >= width) {
              __builtin_prefetch(from + (k + ahead) * step);
              set(to + k * lanes_, get(from + k * step));
            } else {
              for (std::int64_t l = 0; l < width; ++l)
                to[k * lanes_ + l] = l < readable ? to_float(from[k * step + l]) : 0;
            }
          }
        }
      }
    }
    return;
  }
  for (std::int64_t p = first; p < last; ++p) {
    for (std::int64_t v = 0; v < lanes_; v += width) {
      const T* from[width];
      for (std::int64_t l = 0; l < width; ++l)
        from[l] = data + std::min(panels.begin(p) + v + l, panels.total - 1) * row;
      float* to = out + (p - first) * K * lanes_ + v;
      std::int64_t k = 0;
      for (; k + width <= K; k += width) {
        vec block[width];
#pragma GCC unroll 16
        for (int l = 0; l < width; ++l) {
          block[l] = get(from[l] + k);
          __builtin_prefetch(from[l] + k + 8 * width);
        }
        transpose(block);
#pragma GCC unroll 16
        for (int l = 0; l < width; ++l) set(to + (k + l) * lanes_, block[l]);
      }
      for (; k < K; ++k) {
        for (std::int64_t l = 0; l < width; ++l) to[k * lanes_ + l] = to_float(from[l][k]);
      }
    }
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

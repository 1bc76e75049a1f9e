#include "kernels/cpu/product.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/vec.h"

namespace onescale::cpu {
namespace {

using std::int64_t;

// A tile is tile_rows x 2 vectors: as many sums as there are registers, less two for b and one for a.
#ifdef __AVX512F__
constexpr int64_t width = 16, tile_rows = 14;
#else
constexpr int64_t width = 8, tile_rows = 6;
#endif
constexpr int64_t tile_columns = 2 * width;
typedef float vec __attribute__((vector_size(width * 4)));
typedef std::int32_t ivec __attribute__((vector_size(width * 4)));
typedef std::uint32_t uvec __attribute__((vector_size(width * 4)));
typedef std::uint16_t hvec __attribute__((vector_size(width * 2)));

constexpr int64_t max_depth = 768;   // k in one pass: a panel of b and one of a then stay in the second cache
constexpr int64_t group_lanes = 64;  // rows or columns that a thread packs at a time
constexpr int64_t ahead = 32;        // rows of k that are fetched before they are packed

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline vec get(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vec get(const bf16* p) {
  hvec h;
  std::memcpy(&h, p, sizeof h);
  return std::bit_cast<vec>(__builtin_convertvector(h, uvec) << 16);
}
inline void set(float* p, vec v) {
  std::memcpy(p, &v, sizeof v);
}

// How rows or columns are cut into panels. Rows are cut evenly (256 rows: 13 or 14 a panel, no small one at the end),
// columns at multiples of the panel. In a packed panel the lanes of one k lie together, `lanes` apart.
struct Panels {
  int64_t total, lanes, count, size, extra;
  static Panels rows(int64_t M) {
    const int64_t count = ceil_div(M, tile_rows);
    return {M, width, count, M / count, M % count};
  }
  static Panels columns(int64_t N) { return {N, tile_columns, ceil_div(N, tile_columns), tile_columns, 0}; }
  int64_t begin(int64_t p) const { return std::min(total, p * size + std::min(p, extra)); }
};

// Where the packing of an operand is done: before, or by the tile that reads it first, which hides it.
enum class Packs : int { none, a, b };

// c [rows, 2 vectors] = sum over k of a panel of a times a panel of b, plus add (null: nothing; a bias has stride 0).
// With `packs`, a or b is read where it lies, `stride` apart, and its panel is written to `panel`.
template <int rows, Packs packs>
void tile(int64_t K, const float* a, const float* b, float* c, int64_t c_row, const float* add, int64_t add_row,
          float* panel, int64_t stride) {
  vec sum[rows][2] = {};
  const int64_t a_step = packs == Packs::a ? stride : width, b_step = packs == Packs::b ? stride : tile_columns;
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    __builtin_prefetch(c + r * c_row, 1);
    __builtin_prefetch(c + r * c_row + tile_columns - 1, 1);
  }
#pragma GCC unroll 1
  for (int64_t k = 0; k < K; ++k, a += a_step, b += b_step) {
    const vec b0 = get(b), b1 = get(b + width);
    if constexpr (packs == Packs::a) {
      set(panel, get(a));
      panel += width;
      __builtin_prefetch(a + ahead * stride);
      __builtin_prefetch(a + ahead * stride + width - 1);
    } else if constexpr (packs == Packs::b) {
      set(panel, b0);
      set(panel + width, b1);
      panel += tile_columns;
      __builtin_prefetch(b + ahead * stride);
      __builtin_prefetch(b + ahead * stride + tile_columns - 1);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const vec x = a[r] - vec{};
      sum[r][0] += x * b0;
      sum[r][1] += x * b1;
    }
  }
  if (add != nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      sum[r][0] += get(add + r * add_row);
      sum[r][1] += get(add + r * add_row + width);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    set(c + r * c_row, sum[r][0]);
    set(c + r * c_row + width, sum[r][1]);
  }
}

using Tile = void (*)(int64_t, const float*, const float*, float*, int64_t, const float*, int64_t, float*, int64_t);

template <Packs packs, int... i>
Tile tile_of(int64_t rows, std::integer_sequence<int, i...>) {
  static constexpr Tile tiles[] = {tile<i + 1, packs>...};
  return tiles[rows - 1];
}
Tile tile_of(int64_t rows, Packs packs) {
  constexpr std::make_integer_sequence<int, tile_rows> all;
  return packs == Packs::none ? tile_of<Packs::none>(rows, all)
         : packs == Packs::a  ? tile_of<Packs::a>(rows, all)
                              : tile_of<Packs::b>(rows, all);
}

// v[i] lane j becomes v[j] lane i: first 4 x 4 blocks inside quarters of a register, then the quarters.
inline void transpose(vec (&v)[width]) {
  ivec single_low, single_high, pair_low, pair_high, quarter_low, quarter_high;
  for (int l = 0; l < width; ++l) {
    const int q = l / 4 * 4, e = l % 4, n = static_cast<int>(width);
    single_low[l] = q + e / 2 + e % 2 * n;
    pair_low[l] = q + e % 2 + e / 2 * n;
    quarter_low[l] = l % (n / 2) / 4 * 8 + e + l / (n / 2) * n;
  }
  single_high = single_low + 2, pair_high = pair_low + 2, quarter_high = quarter_low + 4;
  vec t[width];
#pragma GCC unroll 16
  for (int i = 0; i < width; i += 2) {
    t[i] = __builtin_shuffle(v[i], v[i + 1], single_low);
    t[i + 1] = __builtin_shuffle(v[i], v[i + 1], single_high);
  }
#pragma GCC unroll 16
  for (int i = 0; i < width; i += 4) {
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = __builtin_shuffle(t[i + j], t[i + j + 2], pair_low);
      v[i + 2 * j + 1] = __builtin_shuffle(t[i + j], t[i + j + 2], pair_high);
    }
  }
  // Now quarter L of v[4g + j] is column 4L + j of the rows 4g .. 4g + 3.
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    if constexpr (width == 16) {
      const vec a0 = __builtin_shuffle(v[j], v[4 + j], quarter_low),
                a1 = __builtin_shuffle(v[j], v[4 + j], quarter_high);
      const vec b0 = __builtin_shuffle(v[8 + j], v[12 + j], quarter_low),
                b1 = __builtin_shuffle(v[8 + j], v[12 + j], quarter_high);
      v[j] = __builtin_shuffle(a0, b0, quarter_low);
      v[8 + j] = __builtin_shuffle(a0, b0, quarter_high);
      v[4 + j] = __builtin_shuffle(a1, b1, quarter_low);
      v[12 + j] = __builtin_shuffle(a1, b1, quarter_high);
    } else {
      const vec a = v[j], b = v[4 + j];
      v[j] = __builtin_shuffle(a, b, quarter_low);
      v[4 + j] = __builtin_shuffle(a, b, quarter_high);
    }
  }
}

// Packs the panels [first, last) over K, one after the other into `out`. Lanes of no row of the panel hold any finite
// or other value: they reach nothing that is kept.
template <class T>
void pack(float* out, const Panels& panels, int64_t first, int64_t last, const T* data, int64_t row, int64_t step,
          int64_t K) {
  const int64_t lanes_ = panels.lanes;
  if (row == 1) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t p = first; p < last; ++p) {
        const int64_t i = panels.begin(p), readable = panels.total - i;
        const T* from = data + i + k * step;
        float* to = out + ((p - first) * K + k) * lanes_;
        for (int64_t v = 0; v < lanes_; v += width) {
          __builtin_prefetch(from + v + ahead * step);
          if (v + width <= readable) {
            set(to + v, get(from + v));
          } else {
            for (int64_t l = v; l < v + width; ++l) to[l] = l < readable ? to_float(from[l]) : 0;
          }
        }
      }
    }
    return;
  }
  for (int64_t p = first; p < last; ++p) {
    for (int64_t v = 0; v < lanes_; v += width) {
      const T* from[width];
      for (int64_t l = 0; l < width; ++l) from[l] = data + std::min(panels.begin(p) + v + l, panels.total - 1) * row;
      float* to = out + (p - first) * K * lanes_ + v;
      int64_t k = 0;
      for (; k + width <= K; k += width) {
        vec block[width];
#pragma GCC unroll 16
        for (int l = 0; l < width; ++l) block[l] = get(from[l] + k);
        transpose(block);
#pragma GCC unroll 16
        for (int l = 0; l < width; ++l) set(to + (k + l) * lanes_, block[l]);
      }
      for (; k < K; ++k) {
        for (int64_t l = 0; l < width; ++l) to[k * lanes_ + l] = to_float(from[l][k]);
      }
    }
  }
}

// The blocks of one product. The operand with fewer rows is packed whole, by all threads, and shared; the other one is
// packed by each thread in groups of panels, just before they are used. When there are few groups the shared panels are
// cut, too.
struct Blocks {
  int64_t depth;  // k in one pass
  Panels rows, columns;
  bool a_shared;
  int64_t group, groups, cuts;
  // floats
  int64_t bias_size, result_size, shared_size, own_size;

  explicit Blocks(const Product& p)
      : depth(ceil_div(p.K, ceil_div(p.K, max_depth))),
        rows(Panels::rows(p.M)),
        columns(Panels::columns(p.N)),
        a_shared(p.M <= p.N) {
    const Panels &shared = a_shared ? rows : columns, &own = a_shared ? columns : rows;
    group = std::clamp<int64_t>(own.count / (2 * p.threads), 1, group_lanes / own.lanes);
    groups = ceil_div(own.count, group);
    cuts = std::min(shared.count, ceil_div(2 * p.threads, groups));
    bias_size = p.input == DType::bfloat16 ? ceil_div(p.N, width) * width : 0;
    result_size = p.output == DType::bfloat16 && p.K > depth ? p.M * p.N : 0;  // sums between passes
    shared_size = shared.count * shared.lanes * depth;
    own_size = group * own.lanes * depth;
  }
};

// One product on its way.
class Running {
 public:
  Running(const Product& product, void* c, int64_t c_row, const void* bias, bool accumulate, char* scratch)
      : product_(product), blocks_(product), c_(c), c_row_(c_row), accumulate_(accumulate) {
    float* next = reinterpret_cast<float*>(scratch);
    const auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    float* wide = take(blocks_.bias_size);
    if (bias != nullptr && product.input == DType::bfloat16) {
      for (int64_t j = 0; j < product.N; ++j) wide[j] = to_float(static_cast<const bf16*>(bias)[j]);
      bias_ = wide;
    } else {
      bias_ = static_cast<const float*>(bias);
    }
    result_ = take(blocks_.result_size);
    result_row_ = product.N;
    if (product.output == DType::float32) result_ = static_cast<float*>(c), result_row_ = c_row;
    shared_panels_ = take(blocks_.shared_size);
    own_panels_ = next;
  }

  template <class T>
  void run(Operand a, Operand b) const {
    const bool a_shared = blocks_.a_shared;
    const Panels &shared = a_shared ? blocks_.rows : blocks_.columns, &own = a_shared ? blocks_.columns : blocks_.rows;
    const Operand from_shared = a_shared ? a : b, from_own = a_shared ? b : a;
    // A tile that packs reads whole vectors, so they must exist.
    const auto packed_by_tile = [&](int64_t last) {
      return std::is_same_v<T, float> && from_own.row == 1 && own.begin(last) + own.lanes <= own.total;
    };
#pragma omp parallel num_threads(product_.threads)
    {
      float* mine = own_panels_ + omp_get_thread_num() * blocks_.own_size;
      for (int64_t k0 = 0; k0 < product_.K; k0 += blocks_.depth) {
        const int64_t depth = std::min(blocks_.depth, product_.K - k0);
        const T* shared_data = static_cast<const T*>(from_shared.data) + k0 * from_shared.step;
        const T* own_data = static_cast<const T*>(from_own.data) + k0 * from_own.step;
        constexpr int64_t together = 4;
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < shared.count; p += together) {
          pack(shared_panels_ + p * shared.lanes * depth, shared, p, std::min(p + together, shared.count), shared_data,
               from_shared.row, from_shared.step, depth);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < blocks_.groups * blocks_.cuts; ++item) {
          const int64_t first = item / blocks_.cuts * blocks_.group, last = std::min(first + blocks_.group, own.count);
          const int64_t cut = item % blocks_.cuts, begin = shared.count * cut / blocks_.cuts,
                        end = shared.count * (cut + 1) / blocks_.cuts;
          const bool by_tile = packed_by_tile(last - 1);
          if (!by_tile) pack(mine, own, first, last, own_data, from_own.row, from_own.step, depth);
          for (int64_t s = begin; s < end; ++s) {
            for (int64_t p = first; p < last; ++p) {
              Step step{k0,           depth, nullptr, nullptr, Packs::none, mine + (p - first) * own.lanes * depth,
                        from_own.step};
              const float* read = step.panel;
              if constexpr (std::is_same_v<T, float>) {
                if (by_tile && s == begin) {
                  step.packs = a_shared ? Packs::b : Packs::a;
                  read = own_data + own.begin(p);
                }
              }
              const float* other = shared_panels_ + s * shared.lanes * depth;
              step.a = a_shared ? other : read;
              step.b = a_shared ? read : other;
              compute(a_shared ? s : p, a_shared ? p : s, step);
            }
          }
        }
      }
    }
  }

 private:
  struct Step {
    int64_t k, depth;
    const float *a, *b;
    Packs packs;
    float* panel;
    int64_t stride;
  };

  // The tile of row panel p and column panel q.
  void compute(int64_t p, int64_t q, const Step& s) const {
    const int64_t i = blocks_.rows.begin(p), height = blocks_.rows.begin(p + 1) - i;
    const int64_t j = q * tile_columns, columns = std::min(tile_columns, product_.N - j);
    const bool last = s.k + s.depth == product_.K, rounded = last && product_.output == DType::bfloat16;
    const bool adds_result = s.k > 0 || accumulate_;
    float* out = result_ + i * result_row_ + j;
    const float* add = adds_result ? out : bias_ == nullptr ? nullptr : bias_ + j;
    const int64_t add_row = adds_result ? result_row_ : 0;
    const Tile tile = tile_of(height, s.packs);
    if (columns == tile_columns && !rounded) {
      tile(s.depth, s.a, s.b, out, result_row_, add, add_row, s.panel, s.stride);
      return;
    }
    float sums[tile_rows * tile_columns];
    tile(s.depth, s.a, s.b, sums, tile_columns, nullptr, 0, s.panel, s.stride);
    for (int64_t r = 0; r < height; ++r) {
      for (int64_t l = 0; l < columns; ++l) {
        const float x = sums[r * tile_columns + l] + (add == nullptr ? 0.0f : add[r * add_row + l]);
        if (rounded)
          put(static_cast<bf16*>(c_)[(i + r) * c_row_ + j + l], x);
        else
          out[r * result_row_ + l] = x;
      }
    }
  }

  const Product& product_;
  const Blocks blocks_;
  void* c_;
  int64_t c_row_;
  bool accumulate_;
  const float* bias_;
  float *result_, *shared_panels_, *own_panels_;  // result: float32 sums; c itself unless that is bfloat16
  int64_t result_row_;
};

}  // namespace

int64_t Product::scratch_bytes() const {
  if (M == 0 || N == 0 || K == 0) return 0;
  const Blocks b(*this);
  return 4 * (b.bias_size + b.result_size + b.shared_size + threads * b.own_size);
}

void Product::run(void* c, int64_t c_row, Operand a, Operand b, const void* bias, bool accumulate,
                  char* scratch) const {
  if (M == 0 || N == 0 || K == 0) return;
  const Running running(*this, c, c_row, bias, accumulate, scratch);
  if (input == DType::bfloat16)
    running.run<bf16>(a, b);
  else
    running.run<float>(a, b);
}

}  // namespace onescale::cpu

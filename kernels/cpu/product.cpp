#include "kernels/cpu/product.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/panels.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

using std::int64_t;

constexpr int64_t max_depth = 384;   // k in one pass: a panel of b and one of a then stay in the second cache
constexpr int64_t fetching = 16;     // tiles that fetch lines of the next group
constexpr int64_t group_lanes = 64;  // rows or columns that a thread packs at a time

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The sums over `depth` of k that a tile computes, of a panel of a and one of b. Beside them it may fetch lines of
// memory that will be packed soon, a line for every four k, so that those on their way stay few: (i % 16, i / 16) lies
// at from + i % 16 * row + i / 16 * line bytes. Its arithmetic hides that.
struct Step {
  int64_t k, depth;
  const float *a = nullptr, *b = nullptr;
  const char* from = nullptr;
  int64_t row = 0, line = 0;
};

// sum + x y. Left to itself GCC 12 renames sums where k is unrolled, with copies and spills.
[[gnu::always_inline]] inline vec add_product(vec sum, vec x, vec y) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}

// c [rows, 2 vectors] = the sums plus add (null: nothing; a bias has stride 0).
template <int rows, bool fetches>
void tile(const Step& s, float* c, int64_t c_row, const float* add, int64_t add_row) {
  vec sum[rows][2] = {};
  const float *a = s.a, *b = s.b;
  const auto multiply = [&](int64_t i) __attribute__((always_inline)) {
    const vec b0 = get(b + i * tile_columns), b1 = get(b + i * tile_columns + width);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const vec x = a[i * width + r] - vec{};
      sum[r][0] = add_product(sum[r][0], x, b0);
      sum[r][1] = add_product(sum[r][1], x, b1);
    }
  };
  const auto multiply_4 = [&](int64_t k) __attribute__((always_inline)) {
    if constexpr (fetches) __builtin_prefetch(s.from + (k >> 2 & 15) * s.row + (k >> 6) * s.line, 0, 2);
    multiply(0), multiply(1), multiply(2), multiply(3);
    a += 4 * width, b += 4 * tile_columns;
  };
  // The lines of c are fetched one by one: at once, they would leave no room for others on their way.
  const int64_t whole = s.depth & ~int64_t{3}, first = std::min<int64_t>(whole, 4 * rows);
  const float* line = c;
  int64_t k = 0;
#pragma GCC unroll 1
  for (; k < first; k += 4, line += c_row) {
    __builtin_prefetch(line, 1);
    __builtin_prefetch(line + tile_columns - 1, 1);
    multiply_4(k);
  }
#pragma GCC unroll 1
  for (; k < whole; k += 4) multiply_4(k);
#pragma GCC unroll 1
  for (; k < s.depth; ++k, a += width, b += tile_columns) multiply(0);
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

using Tile = void (*)(const Step&, float*, int64_t, const float*, int64_t);

template <int... i>
constexpr std::array<Tile, sizeof...(i)> every_tile(std::integer_sequence<int, i...> /*all*/) {
  return {tile<i / 2 + 1, i % 2 == 1>...};
}
constexpr auto tiles = every_tile(std::make_integer_sequence<int, 2 * tile_rows>());

// The part [M, N] of a product, the work of one thread. One operand is packed whole; the other in groups of panels,
// just before they are used.
class Part {
 public:
  Part(const Product& product, int64_t M, int64_t N, bool whole_a)
      : product_(product),
        whole_a_(whole_a),
        depth_(ceil_div(product.K, ceil_div(product.K, max_depth))),
        rows_(Panels::rows(M)),
        columns_(Panels::columns(N)),
        group_(std::clamp<int64_t>(grouped().count / 2, 1, group_lanes / grouped().lanes)) {}

  int64_t floats() const {
    const bool sums = product_.output == DType::bfloat16 && product_.K > depth_;  // between passes over k
    const int64_t panels = whole().count * whole().lanes + group_ * grouped().lanes;
    return panels * depth_ + (sums ? rows_.total * columns_.total : 0);
  }

  template <class T>
  void run(void* c, const Operand& a, const Operand& b, const float* bias, bool accumulate, float* scratch) {
    const Operand &from_whole = whole_a_ ? a : b, &from_grouped = whole_a_ ? b : a;
    const auto take = [&](int64_t size) { return std::exchange(scratch, scratch + size); };
    float* const whole_panels = take(whole().count * whole().lanes * depth_);
    float* const grouped_panels = take(group_ * grouped().lanes * depth_);
    c_ = c, bias_ = bias, accumulate_ = accumulate;
    result_ = product_.output == DType::float32 ? static_cast<float*>(c) : scratch;
    result_row_ = product_.output == DType::float32 ? product_.N : columns_.total;
    for (int64_t k = 0; k < product_.K; k += depth_) {
      const int64_t depth = std::min(depth_, product_.K - k);
      const T* const whole_data = static_cast<const T*>(from_whole.data) + k * from_whole.step;
      const T* const grouped_data = static_cast<const T*>(from_grouped.data) + k * from_grouped.step;
      for (int64_t first = 0, last; first < grouped().count; first = last) {
        last = std::min(first + group_, grouped().count);
        pack(grouped_panels, grouped(), first, last, grouped_data, from_grouped.row, from_grouped.step, depth);
        int64_t left = whole().count * (last - first);  // tiles
        for (int64_t w = 0; w < whole().count; ++w) {
          float* const whole_panel = whole_panels + w * whole().lanes * depth;
          if (first == 0) pack(whole_panel, whole(), w, w + 1, whole_data, from_whole.row, from_whole.step, depth);
          for (int64_t g = first; g < last; ++g) {
            float* const grouped_panel = grouped_panels + (g - first) * grouped().lanes * depth;
            Step step{.k = k,
                      .depth = depth,
                      .a = whole_a_ ? whole_panel : grouped_panel,
                      .b = whole_a_ ? grouped_panel : whole_panel};
            if (--left < fetching && last < grouped().count)
              fetch(step, grouped_data + grouped().begin(last) * from_grouped.row, from_grouped, left);
            compute(step, whole_a_ ? w : g, whole_a_ ? g : w);
          }
        }
      }
    }
  }

 private:
  const Panels& whole() const { return whole_a_ ? rows_ : columns_; }
  const Panels& grouped() const { return whole_a_ ? columns_ : rows_; }

  // The lines of a sixteenth of a group of 64 rows at `data`: of a quarter of the rows and a quarter of k.
  template <class T>
  static void fetch(Step& s, const T* data, const Operand& operand, int64_t which) {
    constexpr int64_t size = sizeof(T), line = 64;
    const int64_t part = which % 4;
    const char* p = reinterpret_cast<const char*>(data + which / 4 * (s.depth / 4) * operand.step);
    if (operand.row == 1)
      s.from = p + part * line, s.row = operand.step * size, s.line = 16 * operand.step * size;
    else
      s.from = p + 16 * part * operand.row * size, s.row = operand.row * size, s.line = line;
  }

  // The tile of row panel p and column panel q.
  void compute(const Step& s, int64_t p, int64_t q) const {
    const int64_t i = rows_.begin(p), height = rows_.begin(p + 1) - i;
    const int64_t j = q * tile_columns, columns = std::min(tile_columns, columns_.total - j);
    const bool last = s.k + s.depth == product_.K, rounded = last && product_.output == DType::bfloat16;
    const bool adds_result = s.k > 0 || accumulate_;
    float* out = result_ + i * result_row_ + j;
    const float* add = adds_result ? out : bias_ == nullptr ? nullptr : bias_ + j;
    const int64_t add_row = adds_result ? result_row_ : 0;
    const Tile tile = tiles.data()[(height - 1) * 2 + (s.from != nullptr)];
    if (columns == tile_columns && !rounded) return tile(s, out, result_row_, add, add_row);
    float sums[tile_rows * tile_columns];
    tile(s, sums, tile_columns, nullptr, 0);
    for (int64_t r = 0; r < height; ++r) {
      each_vector(columns, [&](int64_t l, auto part) {
        f16x x = load(sums + r * tile_columns + l);
        if (add != nullptr) x += part.load(add + r * add_row + l);
        if (rounded)
          part.store(static_cast<bf16*>(c_) + (i + r) * product_.N + j + l, x);
        else
          part.store(out + r * result_row_ + l, x);
      });
    }
  }

  const Product& product_;
  const bool whole_a_;
  const int64_t depth_;  // k in one pass
  const Panels rows_, columns_;
  const int64_t group_;  // panels in a group, at most
  void* c_ = nullptr;
  bool accumulate_ = false;
  const float* bias_ = nullptr;
  float* result_ = nullptr;  // float32 sums: c itself unless that is bfloat16
  int64_t result_row_ = 0;
};

// What packing an element costs.
int64_t packing(const Product& p, const Operand& x) {
  return p.input == DType::float32 && x.row == 1 ? 2 : 8;
}
Parts parts_of(const Product& p) {
  return {p, packing(p, p.a), packing(p, p.b), tile_columns};
}
int64_t floats_of(const Product& p, const Parts& parts) {
  return ceil_div(Part(p, parts.rows, parts.columns, parts.whole_a()).floats(), width) * width;
}

}  // namespace

Parts::Parts(const Product& p, int64_t packing_a, int64_t packing_b, int64_t multiple) {
  const auto cut = [&](int64_t size, int64_t n) {
    return std::min(size, ceil_div(ceil_div(size, n), multiple) * multiple);
  };
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int down = 1; down <= p.threads; ++down) {
    const int64_t r = cut(p.M, down), c = cut(p.N, p.threads / down), cost = r * c + packing_a * r + packing_b * c;
    if (cost < least) least = cost, rows = r, columns = c;
  }
  across = ceil_div(p.N, columns);
  count = ceil_div(p.M, rows) * across;
}

int64_t Product::scratch_bytes() const {
  if (M == 0 || N == 0 || K == 0) return 0;
  if (by_pairs()) return pairs_scratch_bytes();
  const Parts parts = parts_of(*this);
  return parts.count * floats_of(*this, parts) * size_of(DType::float32);
}

void Product::run(void* c, const float* bias, bool accumulate, char* scratch) const {
  if (M == 0 || N == 0) return;
  if (K == 0) {
    if (!accumulate) zero(static_cast<char*>(c), M * N * size_of(output), threads);
    return;
  }
  if (by_pairs()) return run_pairs(c, bias, accumulate, scratch);
  const Parts parts = parts_of(*this);
  const int64_t floats = floats_of(*this, parts);
  with_storage(input, [&]<class T>(T) {
    const auto at = [](const void* p, int64_t index) { return static_cast<const T*>(p) + index; };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < parts.count; ++t) {
      const int64_t i = t / parts.across * parts.rows, j = t % parts.across * parts.columns;
      Part part(*this, std::min(parts.rows, M - i), std::min(parts.columns, N - j), parts.whole_a());
      part.template run<T>(static_cast<char*>(c) + (i * N + j) * size_of(output),
                           {at(a.data, i * a.row), a.row, a.step}, {at(b.data, j * b.row), b.row, b.step},
                           bias == nullptr ? nullptr : bias + j, accumulate,
                           reinterpret_cast<float*>(scratch) + t * floats);
    }
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

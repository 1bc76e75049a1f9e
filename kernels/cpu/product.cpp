#include "kernels/cpu/product.h"

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/cpu/panels.h"

namespace onescale::cpu {
namespace {

using std::int64_t;

constexpr int64_t max_depth = 768;   // k in one pass: a panel of b and one of a then stay in the second cache
constexpr int64_t fetching = 16;     // tiles that fetch lines of the next group
constexpr int64_t group_lanes = 64;  // rows or columns that a thread packs at a time

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// What a tile does beside its sums, whose arithmetic hides it: it packs an operand that it is the first to read, or
// fetches lines of memory that will be packed soon.
enum class Also : int { nothing, packs_a, packs_b, fetches };

// A line for every four k, so that those on their way stay few: (i % 16, i / 16) lies at from + i % 16 * row + i / 16 *
// line bytes.
struct Fetch {
  const char* from;
  int64_t row, line;
};

// c [rows, 2 vectors] = sum over k of a panel of a times a panel of b, plus add (null: nothing; a bias has stride 0). A
// tile that packs reads a or b where it lies, `stride` apart, and writes `panel`.
template <int rows, Also also>
void tile(int64_t K, const float* a, const float* b, float* c, int64_t c_row, const float* add, int64_t add_row,
          [[maybe_unused]] float* panel, int64_t stride, [[maybe_unused]] const Fetch& fetch) {
  vec sum[rows][2] = {};
  const int64_t a_step = also == Also::packs_a ? stride : width, b_step = also == Also::packs_b ? stride : tile_columns;
  const auto multiply = [&](int64_t k) __attribute__((always_inline)) {
    const vec b0 = get(b), b1 = get(b + width);
    if constexpr (also == Also::packs_a) {
      set(panel, get(a));
      panel += width;
      __builtin_prefetch(a + ahead * stride);
      __builtin_prefetch(a + ahead * stride + width - 1);
    } else if constexpr (also == Also::packs_b) {
      set(panel, b0);
      set(panel + width, b1);
      panel += tile_columns;
      __builtin_prefetch(b + ahead * stride);
      __builtin_prefetch(b + ahead * stride + tile_columns - 1);
    } else if constexpr (also == Also::fetches) {
      __builtin_prefetch(fetch.from + k / 4 % 16 * fetch.row + k / 64 * fetch.line, 0, 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const vec x = a[r] - vec{};
      sum[r][0] += x * b0;
      sum[r][1] += x * b1;
    }
    a += a_step, b += b_step;
  };
  // The lines of c are fetched one by one: at once, they would leave no room for others on their way.
  const int64_t first = std::min<int64_t>(K, 32);
#pragma GCC unroll 1
  for (int64_t k = 0; k < first; ++k) {
    __builtin_prefetch(c + k % 16 * c_row + k / 16 * width, 1);
    multiply(k);
  }
#pragma GCC unroll 1
  for (int64_t k = first; k < K; ++k) multiply(k);
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

using Tile = void (*)(int64_t, const float*, const float*, float*, int64_t, const float*, int64_t, float*, int64_t,
                      const Fetch&);

template <Also also, int... i>
Tile tile_of(int64_t rows, std::integer_sequence<int, i...>) {
  static constexpr Tile tiles[] = {tile<i + 1, also>...};
  return tiles[rows - 1];
}
Tile tile_of(int64_t rows, Also also) {
  constexpr std::make_integer_sequence<int, tile_rows> all;
  switch (also) {
    case Also::nothing:
      return tile_of<Also::nothing>(rows, all);
    case Also::packs_a:
      return tile_of<Also::packs_a>(rows, all);
    case Also::packs_b:
      return tile_of<Also::packs_b>(rows, all);
    default:
      return tile_of<Also::fetches>(rows, all);
  }
}

// The blocks of one product. The operand with fewer rows is packed whole, by all threads, and shared; the other one is
// packed by each thread in groups of panels, just before they are used.
struct Blocks {
  int64_t depth;  // k in one pass
  Panels rows, columns;
  bool a_shared;
  int64_t group;  // panels in a group, at most
  // floats
  int64_t bias_size, result_size, shared_size, own_size;

  explicit Blocks(const Product& p)
      : depth(ceil_div(p.K, ceil_div(p.K, max_depth))),
        rows(Panels::rows(p.M)),
        columns(Panels::columns(p.N)),
        a_shared(p.M <= p.N) {
    const Panels &shared = a_shared ? rows : columns, &own = a_shared ? columns : rows;
    group = std::clamp<int64_t>(own.count / (2 * p.threads), 1, group_lanes / own.lanes);
    bias_size = p.input == DType::bfloat16 ? ceil_div(p.N, width) * width : 0;
    result_size = p.output == DType::bfloat16 && p.K > depth ? p.M * p.N : 0;  // sums between passes
    // Of two passes where threads share them: the slower ones may still read those of the pass before.
    shared_size = shared.count * shared.lanes * std::min(p.threads > 1 ? 2 * depth : depth, p.K);
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
    const auto packed_by_tile = [](const Operand& from, const Panels& panels, int64_t last) {
      return std::is_same_v<T, float> && from.row == 1 && panels.begin(last) + panels.lanes <= panels.total;
    };
    // Where tiles can pack the shared operand, those of the first group do it. The other groups are a multiple of the
    // threads, larger ones first; when they are few the shared panels are cut, too.
    const int64_t threads = product_.threads, early = packed_by_tile(from_shared, shared, 0) ? blocks_.group : 0;
    const int64_t later = own.count - early;
    const int64_t groups = std::min(ceil_div(later, blocks_.group * threads) * threads, later);
    const int64_t cuts = groups == 0 ? 0 : std::min(shared.count, ceil_div(2 * threads, groups));
    const auto begin_of = [&](int64_t g) { return early + g * (later / groups) + std::min(g, later % groups); };
#pragma omp parallel num_threads(product_.threads)
    {
      float* mine = own_panels_ + omp_get_thread_num() * blocks_.own_size;
      for (int64_t k0 = 0; k0 < product_.K; k0 += blocks_.depth) {
        const int64_t depth = std::min(blocks_.depth, product_.K - k0);
        const T* shared_data = static_cast<const T*>(from_shared.data) + k0 * from_shared.step;
        const T* own_data = static_cast<const T*>(from_own.data) + k0 * from_own.step;
        const int64_t which = product_.threads > 1 ? k0 / blocks_.depth % 2 : 0;
        float* const panels = shared_panels_ + which * shared.count * shared.lanes * blocks_.depth;
        // The tiles of the shared panels [begin, end), of which those before `packed` are packed, and the own panels
        // [first, last), which are packed when `ready`; `next` is the first of the own panels that are packed next.
        const auto multiply = [&](int64_t begin, int64_t packed, int64_t end, int64_t first, int64_t last, bool ready,
                                  int64_t next) {
          int64_t left = (end - begin) * (last - first);  // tiles
          for (int64_t s = begin; s < end; ++s) {
            for (int64_t p = first; p < last; ++p) {
              --left;
              float* const shared_panel = panels + s * shared.lanes * depth;
              float* const own_panel = mine + (p - first) * own.lanes * depth;
              const float *x = shared_panel, *y = own_panel;
              Step step{k0, depth, nullptr, nullptr, Also::nothing, nullptr, 0, {}};
              if constexpr (std::is_same_v<T, float>) {
                if (!ready && s == begin) {
                  step.also = a_shared ? Also::packs_b : Also::packs_a;
                  step.panel = own_panel, step.stride = from_own.step;
                  y = own_data + own.begin(p);
                } else if (s >= packed && p == first) {
                  step.also = a_shared ? Also::packs_a : Also::packs_b;
                  step.panel = shared_panel, step.stride = from_shared.step;
                  x = shared_data + shared.begin(s);
                }
              }
              if (step.also == Also::nothing && left < fetching && next < own.count) {
                step.also = Also::fetches;
                step.fetch = lines(own_data, from_own, own.begin(next), left, depth);
              }
              step.a = a_shared ? x : y;
              step.b = a_shared ? y : x;
              compute(a_shared ? s : p, a_shared ? p : s, step);
            }
          }
        };
        const bool early_by_tile = early > 0 && packed_by_tile(from_own, own, early - 1);
        bool ready = early == 0;  // the panels of the first group
        constexpr int64_t together = 2;
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < shared.count; p += together) {
          const int64_t end = std::min(p + together, shared.count);
          if (!ready && !early_by_tile) {
            pack(mine, own, 0, early, own_data, from_own.row, from_own.step, depth);
            ready = true;
          }
          // A tile packs one operand.
          const bool by_tile = early > 0 && packed_by_tile(from_shared, shared, end - 1);
          const int64_t packed = !by_tile ? end : ready ? p : p + 1;
          pack(panels + p * shared.lanes * depth, shared, p, packed, shared_data, from_shared.row, from_shared.step,
               depth);
          multiply(p, packed, end, 0, early, ready, own.count);
          ready = true;
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < groups * cuts; ++item) {
          const int64_t g = item / cuts, first = begin_of(g), last = begin_of(g + 1), cut = item % cuts;
          const bool by_tile = packed_by_tile(from_own, own, last - 1);
          if (!by_tile) pack(mine, own, first, last, own_data, from_own.row, from_own.step, depth);
          // When groups are taken in turn, the next one comes after those of the other threads.
          multiply(shared.count * cut / cuts, shared.count, shared.count * (cut + 1) / cuts, first, last, !by_tile,
                   g + threads < groups ? begin_of(g + threads) : own.count);
        }
      }
    }
  }

 private:
  struct Step {
    int64_t k, depth;
    const float *a, *b;
    Also also;
    float* panel;
    int64_t stride;
    Fetch fetch;
  };

  // The lines of a sixteenth of a group of 64 rows from row i on: of a quarter of the rows and a quarter of k.
  template <class T>
  static Fetch lines(const T* data, const Operand& from, int64_t i, int64_t which, int64_t depth) {
    constexpr int64_t size = sizeof(T), line = 64;
    const int64_t part = which % 4;
    const char* p = reinterpret_cast<const char*>(data + i * from.row + which / 4 * (depth / 4) * from.step);
    if (from.row == 1) return {p + part * line, from.step * size, 16 * from.step * size};
    return {p + 16 * part * from.row * size, from.row * size, line};
  }

  // The tile of row panel p and column panel q.
  void compute(int64_t p, int64_t q, const Step& s) const {
    const int64_t i = blocks_.rows.begin(p), height = blocks_.rows.begin(p + 1) - i;
    const int64_t j = q * tile_columns, columns = std::min(tile_columns, product_.N - j);
    const bool last = s.k + s.depth == product_.K, rounded = last && product_.output == DType::bfloat16;
    const bool adds_result = s.k > 0 || accumulate_;
    float* out = result_ + i * result_row_ + j;
    const float* add = adds_result ? out : bias_ == nullptr ? nullptr : bias_ + j;
    const int64_t add_row = adds_result ? result_row_ : 0;
    const Tile tile = tile_of(height, s.also);
    if (columns == tile_columns && !rounded) {
      tile(s.depth, s.a, s.b, out, result_row_, add, add_row, s.panel, s.stride, s.fetch);
      return;
    }
    float sums[tile_rows * tile_columns];
    tile(s.depth, s.a, s.b, sums, tile_columns, nullptr, 0, s.panel, s.stride, s.fetch);
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

// Threads that have enough to do each take a part of the longer side and pack the other operand for themselves: they
// need not wait for each other, and cores that share no cache do not exchange panels. 0: threads share the panels.
int64_t part_size(const Product& p) {
  constexpr int64_t least = 256;
  const int64_t side = std::max(p.M, p.N);
  if (p.threads == 1 || side < least * p.threads) return 0;
  return ceil_div(ceil_div(side, p.threads), tile_columns) * tile_columns;
}
Product part_of(const Product& p, int64_t begin, int64_t size) {
  Product part = p;
  part.threads = 1;
  int64_t& side = p.M > p.N ? part.M : part.N;
  side = std::clamp<int64_t>(side - begin, 0, size);
  return part;
}
// Scratch of a part: the last one is smaller, but may share the panels of the other operand.
int64_t part_bytes(const Product& p, int64_t size) {
  int64_t most = 0;
  for (int64_t t = 0; t < p.threads; ++t) most = std::max(most, part_of(p, t * size, size).scratch_bytes());
  return ceil_div(most, 64) * 64;
}

}  // namespace

int64_t Product::scratch_bytes() const {
  if (M == 0 || N == 0 || K == 0) return 0;
  if (const int64_t part = part_size(*this); part > 0) return threads * part_bytes(*this, part);
  const Blocks b(*this);
  return 4 * (b.bias_size + b.result_size + b.shared_size + threads * b.own_size);
}

void Product::run(void* c, int64_t c_row, Operand a, Operand b, const void* bias, bool accumulate,
                  char* scratch) const {
  if (M == 0 || N == 0 || K == 0) return;
  if (const int64_t part = part_size(*this); part > 0) {
    const int64_t each = part_bytes(*this, part);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < threads; ++t) {
      const int64_t i = M > N ? t * part : 0, j = M > N ? 0 : t * part;
      const auto at = [](const void* p, int64_t index, DType type) -> const void* {
        return p == nullptr ? nullptr : static_cast<const char*>(p) + index * size_of(type);
      };
      part_of(*this, t * part, part)
          .run(static_cast<char*>(c) + (i * c_row + j) * size_of(output), c_row,
               {at(a.data, i * a.row, input), a.row, a.step}, {at(b.data, j * b.row, input), b.row, b.step},
               at(bias, j, input), accumulate, scratch + t * each);
    }
    return;
  }
  const Running running(*this, c, c_row, bias, accumulate, scratch);
  if (input == DType::bfloat16)
    running.run<bf16>(a, b);
  else
    running.run<float>(a, b);
}

}  // namespace onescale::cpu

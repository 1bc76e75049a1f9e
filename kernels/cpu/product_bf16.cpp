// Products of bfloat16 by instructions that multiply pairs and add to float32 sums. A word is a pair: elements 2 w and
// 2 w + 1 of k. Both operands are packed into panels of 32 rows (of a) or columns (of b), in blocks of 16 words: a
// block of a is two tiles of 16 rows [row][word], one of b [word][32 columns]. What lies beyond an operand is packed as
// zeros.
#include <sys/syscall.h>
#include <unistd.h>

#include <cpuid.h>
#include <algorithm>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/transpose.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

using std::int64_t;

constexpr int64_t panel = 32, tile = 16;              // lanes; words and lanes of a tile
constexpr int64_t block_k = 2 * tile;                 // k of a block
constexpr int64_t block_floats = panel * tile;        // a word takes the place of a float
constexpr int64_t max_depth = 4096;                   // k in one pass
constexpr int64_t group_bytes = int64_t{512} * 1024;  // of the panels that are packed at a time: part of a second cache

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Sixteen words, of one lane from k on, or of sixteen lanes at k and k + 1; `count` elements or lanes exist.
[[gnu::always_inline]] inline vec words_of_lane(const bf16* p, int64_t count) {
  const auto mask = static_cast<__mmask32>(count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1);
  return std::bit_cast<vec>(_mm512_maskz_loadu_epi16(mask, p));
}
[[gnu::always_inline]] inline vec words_of_lanes(const bf16* p, int64_t step, int64_t lanes_, int64_t k_left) {
  const auto mask = static_cast<__mmask16>(lanes_ >= 16 ? 0xffff : lanes_ <= 0 ? 0 : (1 << lanes_) - 1);
  const __m256i even = k_left > 0 ? _mm256_maskz_loadu_epi16(mask, p) : __m256i{};
  const __m256i odd = k_left > 1 ? _mm256_maskz_loadu_epi16(mask, p + step) : __m256i{};
  return as<f16x>(widen(std::bit_cast<h16x>(even)) | widen(std::bit_cast<h16x>(odd)) << 16).part[0];
}

// sum + the products of pairs, by assembly for the same reason as in product.cpp.
[[gnu::always_inline]] inline vec add_products(vec sum, vec x, vec y) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}

// Packs the panel whose first lane is at `data`, of which `lanes_` exist, over K. by_lane: as a panel of a, whose
// blocks hold a lane's words together; else as one of b.
template <bool by_lane>
void pack(float* out, int64_t lanes_, const bf16* data, int64_t row, int64_t step, int64_t K) {
  for (int64_t k = 0; k < K; k += block_k, out += block_floats) {
    for (int64_t v = 0; v < panel; v += tile) {
      vec square[tile];
      const bool lanes_first = step == 1;
      if (lanes_first) {
#pragma GCC unroll 16
        for (int64_t l = 0; l < tile; ++l) {
          const bf16* const p = data + (v + l) * row + k;
          __builtin_prefetch(p + 8 * block_k);
          square[l] = words_of_lane(p, v + l < lanes_ ? K - k : 0);
        }
      } else {
#pragma GCC unroll 16
        for (int64_t w = 0; w < tile; ++w) {
          const bf16* const p = data + v + (k + 2 * w) * step;
          if (v == 0) __builtin_prefetch(p + block_k * step), __builtin_prefetch(p + (block_k + 1) * step);
          square[w] = words_of_lanes(p, step, lanes_ - v, K - k - 2 * w);
        }
      }
      if (lanes_first != by_lane) transpose(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < tile; ++i) set(by_lane ? out + (v + i) * tile : out + i * panel + v, square[i]);
    }
  }
}

// sums [32, 32] = a panel of a times one of b over `blocks` blocks; only the first `rows` rows are needed.
void multiply_vectors(float* sums, const float* a, const float* b, int64_t blocks, int64_t rows) {
  constexpr int high = 11;  // sums in 22 of 32 registers; the last rows of three times as many are computed twice
  for (int64_t done = 0; done < rows; done += high) {
    const int64_t first = std::min(done, panel - high);
    vec sum[high][2] = {};
    const float *x = a + first * tile, *y = b;
    for (int64_t k = 0; k < blocks; ++k, x += block_floats - tile) {
#pragma GCC unroll 2
      for (int64_t w = 0; w < tile; ++w, ++x, y += panel) {
        const vec b0 = get(y), b1 = get(y + width);
#pragma GCC unroll 11
        for (int r = 0; r < high; ++r) {
          const vec both = x[r * tile] - vec{};
          sum[r][0] = add_products(sum[r][0], both, b0);
          sum[r][1] = add_products(sum[r][1], both, b1);
        }
      }
    }
#pragma GCC unroll 11
    for (int r = 0; r < high; ++r) {
      set(sums + (first + r) * panel, sum[r][0]);
      set(sums + (first + r) * panel + width, sum[r][1]);
    }
  }
}

// The same in tiles; only those of the first `rows` rows and `columns` columns are computed.
template <bool two_down, bool two_across>
void multiply_tiles(float* sums, int64_t sums_row, const float* a, const float* b, int64_t blocks) {
  constexpr int64_t a_row = tile * 4, b_row = panel * 4;
  asm volatile("" ::: "memory");  // the loads below do not say that they read memory: what was packed must be there
  _tile_zero(0);
  if constexpr (two_across) _tile_zero(1);
  if constexpr (two_down) _tile_zero(2);
  if constexpr (two_down && two_across) _tile_zero(3);
  for (int64_t k = 0; k < blocks; ++k, a += block_floats, b += block_floats) {
    _tile_loadd(4, a, a_row);
    _tile_loadd(6, b, b_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (two_across) {
      _tile_loadd(7, b + tile, b_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (two_down) {
      _tile_loadd(5, a + tile * tile, a_row);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (two_down && two_across) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, sums_row * 4);
  if constexpr (two_across) _tile_stored(1, sums + tile, sums_row * 4);
  if constexpr (two_down) _tile_stored(2, sums + tile * sums_row, sums_row * 4);
  if constexpr (two_down && two_across) _tile_stored(3, sums + tile * sums_row + tile, sums_row * 4);
}

// Eight tiles of 16 rows of 64 bytes, while it lives.
class TileRegisters {
 public:
  TileRegisters() {
    // Constant: the compiler takes loadconfig for one that reads 8 bytes, and would leave out to write the rest.
    struct alignas(64) Configuration {
      std::uint8_t palette, start_row, reserved[14];
      std::uint16_t row_bytes[16];
      std::uint8_t rows[16];
    };
    static constexpr Configuration eight = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&eight);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// The part [M, N] of a product, the work of one thread. One operand is packed whole; the other in groups of panels,
// just before they are used.
class Part {
 public:
  Part(const Product& product, int64_t M, int64_t N, bool whole_a)
      : product_(product),
        M_(M),
        N_(N),
        depth_(ceil_div(ceil_div(product.K, ceil_div(product.K, max_depth)), block_k) * block_k),
        whole_a_(whole_a),
        group_(std::clamp<int64_t>(group_bytes / (panel * depth_ * 2), 1, ceil_div(whole_a_ ? N : M, panel))) {}

  int64_t floats() const {
    const int64_t panels = ceil_div(whole_a_ ? M_ : N_, panel) + group_;
    return panels * panel_floats() + (keeps_sums() ? M_ * N_ : 0);
  }

  void run(char* c, const Operand& a, const Operand& b, const float* bias, bool accumulate, float* scratch) const {
    const Operand &from_whole = whole_a_ ? a : b, &from_grouped = whole_a_ ? b : a;
    const int64_t whole = whole_a_ ? M_ : N_, grouped = whole_a_ ? N_ : M_;
    float* const whole_panels = scratch;
    float* const grouped_panels = whole_panels + ceil_div(whole, panel) * panel_floats();
    float* const between = grouped_panels + group_ * panel_floats();
    for (int64_t k = 0; k < product_.K; k += depth_) {
      const int64_t depth = std::min(depth_, product_.K - k), blocks = ceil_div(depth, block_k);
      for (int64_t first = 0; first < grouped; first += group_ * panel) {
        const int64_t last = std::min(grouped, first + group_ * panel);
        for (int64_t g = first; g < last; g += panel)
          pack_one(!whole_a_, grouped_panels + (g - first) / panel * panel_floats(), from_grouped, g, grouped - g, k,
                   depth);
        for (int64_t w = 0; w < whole; w += panel) {
          float* const one = whole_panels + w / panel * panel_floats();
          if (first == 0) pack_one(whole_a_, one, from_whole, w, whole - w, k, depth);
          for (int64_t g = first; g < last; g += panel) {
            const float* const other = grouped_panels + (g - first) / panel * panel_floats();
            compute(whole_a_ ? one : other, whole_a_ ? other : one, blocks, whole_a_ ? w : g, whole_a_ ? g : w, k == 0,
                    k + depth == product_.K, c, bias, accumulate, between);
          }
        }
      }
    }
  }

 private:
  int64_t panel_floats() const { return panel * depth_ / 2; }
  bool keeps_sums() const { return product_.output == DType::bfloat16 && product_.K > depth_; }

  static void pack_one(bool of_a, float* out, const Operand& from, int64_t lane, int64_t lanes_, int64_t k,
                       int64_t depth) {
    const bf16* const data = static_cast<const bf16*>(from.data) + lane * from.row + k * from.step;
    (of_a ? pack<true> : pack<false>)(out, std::min(panel, lanes_), data, from.row, from.step, depth);
  }

  // c [i .. i + 32, j .. j + 32] from a panel of a and one of b. Sums between passes over k lie in c where it is
  // float32.
  void compute(const float* a, const float* b, int64_t blocks, int64_t i, int64_t j, bool first, bool last, char* c,
               const float* bias, bool accumulate, float* between) const {
    const int64_t rows = std::min(panel, M_ - i), columns = std::min(panel, N_ - j);
    const bool wide = product_.output == DType::float32;
    float* const result = wide ? reinterpret_cast<float*>(c) + i * product_.N + j : between + i * N_ + j;
    const int64_t result_row = wide ? product_.N : N_;
    const bool adds = !first || accumulate,
               direct = wide && !adds && bias == nullptr && rows == panel && columns == panel;
    float own[panel * panel];
    float* const sums = direct ? result : own;
    const int64_t sums_row = direct ? result_row : panel;
    if (product_.bf16 == Bf16::tiles) {
      static constexpr std::array multiply = {multiply_tiles<false, false>, multiply_tiles<false, true>,
                                              multiply_tiles<true, false>, multiply_tiles<true, true>};
      const std::size_t shape = (rows > tile ? 2u : 0u) + (columns > tile ? 1u : 0u);
      multiply[shape](sums, sums_row, a, b, blocks);
      if (direct) return;
    } else {
      multiply_vectors(own, a, b, blocks, rows);
    }
    for (int64_t r = 0; r < rows; ++r) {
      each_vector(columns, [&](int64_t l, auto part) {
        f16x x = part.load(own + r * panel + l);
        if (adds) x += part.load(result + r * result_row + l);
        if (first && bias != nullptr) x += part.load(bias + j + l);
        if (wide || !last)
          part.store(result + r * result_row + l, x);
        else
          part.store(reinterpret_cast<bf16*>(c) + (i + r) * product_.N + j + l, x);
      });
    }
  }

  const Product& product_;
  const int64_t M_, N_;
  const int64_t depth_;  // k in one pass, whole blocks
  const bool whole_a_;
  const int64_t group_;  // panels in a group, at most
};

Parts parts_of(const Product& p) {
  return {p, 16, 16, panel};
}

// Whether a bit of CPUID's four registers (eax, ebx, ecx, edx) is set.
bool has(unsigned leaf, unsigned subleaf, std::size_t which, unsigned bit) {
  std::array<unsigned, 4> r{};
  return __get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3]) != 0 && (r[which] >> bit & 1) != 0;
}

}  // namespace

Bf16 fastest_bf16() {
  // AMX-TILE and AMX-BF16; Linux gives the state of tiles (feature 18) to those who ask.
  constexpr long arch_req_xcomp_perm = 0x1023, tile_data = 18;
  if (has(7, 0, 3, 24) && has(7, 0, 3, 22) && syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0)
    return Bf16::tiles;
  // AVX512_BF16. AMD multiplies pairs at twice the rate of float32; Intel, without tiles, at half of it.
  return has(7, 1, 0, 5) && __builtin_cpu_is("amd") ? Bf16::vectors : Bf16::converted;
}

double multiply_pairs(Bf16 by) {
  constexpr int64_t rounds = 1 << 12;
  if (by == Bf16::tiles) {
    const TileRegisters registers;
    for (int64_t i = 0; i < rounds; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    return 4.0 * tile * tile * block_k * 2 * rounds;
  }
  constexpr int chains = 12;
  vec sum[chains] = {};
#pragma GCC unroll 1
  for (int64_t i = 0; i < 8 * rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) asm volatile("vdpbf16ps %0, %0, %0" : "+v"(sum[c]));
  }
  return 4.0 * chains * width * 8 * rounds;
}

int64_t Product::pairs_scratch_bytes() const {
  const Parts parts = parts_of(*this);
  return parts.count * ceil_div(Part(*this, parts.rows, parts.columns, parts.whole_a()).floats(), width) * width * 4;
}

void Product::run_pairs(void* c, const float* bias, bool accumulate, char* scratch) const {
  const Parts parts = parts_of(*this);
  const int64_t bytes = pairs_scratch_bytes() / parts.count;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < parts.count; ++t) {
    const int64_t i = t / parts.across * parts.rows, j = t % parts.across * parts.columns;
    const auto at = [](const Operand& x, int64_t lane) {
      return Operand{static_cast<const onescale::bf16*>(x.data) + lane * x.row, x.row, x.step};
    };
    const Part part(*this, std::min(parts.rows, M - i), std::min(parts.columns, N - j), parts.whole_a());
    const auto run = [&] {
      part.run(static_cast<char*>(c) + (i * N + j) * size_of(output), at(a, i), at(b, j),
               bias == nullptr ? nullptr : bias + j, accumulate, reinterpret_cast<float*>(scratch + t * bytes));
    };
    if (bf16 == Bf16::tiles) {
      const TileRegisters registers;
      run();
    } else {
      run();
    }
  }
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

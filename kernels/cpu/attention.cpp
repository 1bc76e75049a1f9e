// Attention, forward: every task takes some rows of queries through all keys that they see, block by block, and keeps a
// running maximum and denominator (Milakov and Gimelshein 2018, Rabe and Staats 2021).
#include <omp.h>

#include <cmath>

#include "kernels/arguments.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/cpu_device.h"

namespace onescale::cpu::inline ONESCALE_ISA {

void check_like(const char* operation, const char* name, const Tensor& t, const Tensor& like) {
  check(t.rank == like.rank && t.shape == like.shape && t.dtype == like.dtype, operation, ": ", name, " is ",
        t.describe(), ", but needs to be ", like.describe());
  check(t.dim(-1) <= 1 || t.stride[3] == 1, operation, ": the last axis of ", name, " has stride ", t.stride[3],
        " and must be contiguous");
}

double check_attention(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
                       const Visible& visible, const Dropout& dropout) {
  check(q.rank == 4 && (q.dtype == DType::float32 || q.dtype == DType::bfloat16), operation,
        ": q must be float32 or bfloat16 [B, n_q, h, d], not ", q.describe());
  check(k.rank == 4, operation, ": k must be [B, n_k, h_kv, d], not ", k.describe());
  const std::int64_t B = q.dim(0), n_q = q.dim(1), h = q.dim(2), d = q.dim(3), n_k = k.dim(1);
  check(k.dim(0) == B && k.dim(3) == d && (k.dim(2) == 1 || k.dim(2) == h), operation, ": k ", k.describe(),
        " does not fit q ", q.describe(), "; it needs the same batch and head size, and 1 or as many heads");
  check(q.numel() > 0 && n_k > 0, operation, ": q ", q.describe(), " or k ", k.describe(), " is empty");
  check_like(operation, "q", q, q), check_like(operation, "v", v, k);
  Tensor k_as_q = k;
  k_as_q.dtype = q.dtype;
  check_like(operation, "k", k, k_as_q);
  expect(operation, {{"lse", lse, DType::float32, {B, n_q, h}},
                     {"the first visible keys", visible.first, DType::int32, {B, n_q}},
                     {"the last visible keys", visible.last, DType::int32, {B, n_q}}});
  check(dropout.p >= 0 && dropout.p < 1, operation, ": the dropout probability ", dropout.p,
        " must be at least 0 and below 1");
  if (dropout.p > 0) expect(operation, {{"positions", dropout.positions, DType::int32, {B, n_q}}});
  const auto* first = visible.first.as<std::int32_t>();
  const auto* last = visible.last.as<std::int32_t>();
  double pairs = 0;
  if (first == nullptr) return static_cast<double>(B * n_q * h) * static_cast<double>(n_k) / (n_q == n_k ? 2 : 1);
  for (std::int64_t i = 0; i < B * n_q; ++i)
    pairs += static_cast<double>(
        std::max<std::int64_t>(std::min<std::int64_t>(last[i], n_k - 1) - std::max(first[i], 0) + 1, 0));
  return pairs * static_cast<double>(h);
}

namespace {

// A score may exceed the running maximum by this (in powers of 2) before the maximum is raised and what was added is
// rescaled.
constexpr float slack = 8;

// Rows of a task: enough to make the packing of a block of keys cheap, few enough for tasks to go round. Depends on
// shapes only.
std::int64_t rows_of_task(std::int64_t rows, std::int64_t groups) {
  const std::int64_t most = std::clamp<std::int64_t>(rows * groups / 12, 48, 264), tasks = (rows + most - 1) / most;
  return ((rows + tasks - 1) / tasks + register_rows - 1) / register_rows * register_rows;
}

struct Tile {
  float *q, *o, *k, *v, *s, *max;
  f16x* sum;
  Seen *row, *group;
  Tile(Arena& arena, std::int64_t rows, std::int64_t d)
      : q(arena.take<float>(rows * padded(d))),
        o(arena.take<float>(rows * padded(d))),
        k(arena.take<float>(d * key_block)),
        v(arena.take<float>(key_block * padded(d))),
        s(arena.take<float>(register_rows * key_block)),
        max(arena.take<float>(rows)),
        sum(arena.take<f16x>(rows)),
        row(arena.take<Seen>(rows)),
        group(arena.take<Seen>(rows / register_rows + 1)) {}
};

// N vectors of scores, times c, of a row and the keys from `key` on become probabilities that are not yet divided by
// their sum.
template <int N>
void softmax_row(const Tile& t, std::int64_t r, std::int64_t width, float* s, std::int64_t key, float c) {
  f16x x[N];
  for (int j = 0; j < N; ++j) x[j] = load(s + j * lanes) * splat(c);
  if (!t.row[r].all(key, key + N * lanes)) {
    for (int j = 0; j < N; ++j) x[j] = select(visible_lanes(t.row[r], key + j * lanes), x[j], splat(-__builtin_inff()));
  }
  f16x most = x[0];
  for (int j = 1; j < N; ++j) most = max(most, x[j]);
  const float high = max(most);
  float top = t.max[r];
  f16x total = t.sum[r];
  if (high > top + slack) {
    const f16x shrink = exp2(splat(top - high));
    t.max[r] = top = high;
    total *= shrink;
    for (std::int64_t i = 0; i < width; i += lanes) store(t.o + r * width + i, load(t.o + r * width + i) * shrink);
  }
  for (int j = 0; j < N; ++j) {
    x[j] = exp2(x[j] - splat(top));
    total += x[j];
    store(s + j * lanes, x[j]);
  }
  t.sum[r] = total;
}

template <class T>
struct Forward {
  HeadView<T> o, q, k, v;
  float* lse;
  std::int64_t n_q, n_k, d, h;
  float c;  // scores times this are powers of 2
  const Visible& visible;
  const Dropout& dropout;
  KeyDropout draws{dropout};
  std::int64_t width = padded(d);

  // `next` is what this thread will probably do afterwards.
  void run(const Rows& rows, const Rows& next, const Tile& t) const {
    const Seen whole = see(visible, n_k, rows, t.row, t.group);
    const std::int64_t start = whole.lo < whole.hi ? whole.lo / key_block * key_block : 0;
    for (std::int64_t key = start; key == start || key < whole.hi; key += key_block) {
      const std::int64_t keys = std::min(key_block, n_k - key);
      pack_transposed(t.k, keys, d, [&](std::int64_t j) { return k(rows.b, key + j, rows.kv_head); });
      for (std::int64_t j = 0; j < keys; ++j) pack(t.v + j * width, v(rows.b, key + j, rows.kv_head), d);
      for (std::int64_t r = 0; r < rows.count; r += register_rows) {
        const Seen& seen = t.group[r / register_rows];
        const std::int64_t end = std::min(r + register_rows, rows.count);
        const bool more = key + key_block < whole.hi;
        fetch(more ? rows : next, more ? key + key_block : 0, r * key_block / rows.count, end * key_block / rows.count);
        if (!more) {
          next.each(r, std::min(end, next.count),
                    [&](std::int64_t, std::int64_t i, std::int64_t head) { prefetch(q(next.b, i, head), d); });
        }
        if (key == start) open(rows, t, r, end);
        if (seen.any(key, key + keys)) add_keys(rows, t, r, end, key, keys);
        if (key == std::max(start, (seen.hi - 1) / key_block * key_block)) close(rows, t, r, end);
      }
    }
  }

  // Keys [begin, end) of the block at `key` into the cache.
  void fetch(const Rows& rows, std::int64_t key, std::int64_t begin, std::int64_t end) const {
    for (std::int64_t j = key + begin; j < std::min(key + end, n_k); ++j)
      prefetch(k(rows.b, j, rows.kv_head), d), prefetch(v(rows.b, j, rows.kv_head), d);
  }

  void open(const Rows& rows, const Tile& t, std::int64_t begin, std::int64_t end) const {
    rows.each(begin, end,
              [&](std::int64_t r, std::int64_t i, std::int64_t head) { pack(t.q + r * width, q(rows.b, i, head), d); });
    std::fill(t.o + begin * width, t.o + end * width, 0.0f);
    std::fill(t.max + begin, t.max + end, -1e30f);  // finite, so that a row without keys does not subtract infinities
    std::fill(t.sum + begin, t.sum + end, f16x{});
  }

  void add_keys(const Rows& rows, const Tile& t, std::int64_t begin, std::int64_t end, std::int64_t key,
                std::int64_t keys) const {
    const Seen& seen = t.group[begin / register_rows];
    const std::int64_t from = std::max(seen.lo - key, std::int64_t{0}), to = std::min(seen.hi - key, keys),
                       lo = from / lanes * lanes, wide = padded(to) - lo;
    static constexpr std::array softmax = {softmax_row<1>, softmax_row<2>, softmax_row<3>, softmax_row<4>};
    product<false>(end - begin, wide, d, t.q + begin * width, width, t.k + lo, key_block, t.s + lo, key_block, false);
    rows.each(begin, end, [&](std::int64_t r, std::int64_t i, std::int64_t head) {
      float* s = t.s + (r - begin) * key_block;
      softmax[static_cast<std::size_t>(wide / lanes - 1)](t, r, width, s + lo, key + lo, c);
      if (dropout.p > 0) {
        const Philox16 words = draws.words(rows.b, i, head, key);
        for (std::int64_t j = lo; j < lo + wide; j += lanes)
          store(s + j, select(draws.keep(words.w[j / lanes]), load(s + j), f16x{}));
      }
    });
    product<false>(end - begin, width, to - from, t.s + from, key_block, t.v + from * width, width, t.o + begin * width,
                   width, true);
  }

  void close(const Rows& rows, const Tile& t, std::int64_t begin, std::int64_t end) const {
    rows.each(begin, end, [&](std::int64_t r, std::int64_t i, std::int64_t head) {
      const float total = sum(t.sum[r]), scale = total == 0 ? 0 : 1 / (total * (1 - dropout.p));
      lse[(rows.b * n_q + i) * h + head] = total == 0 ? -__builtin_inff() : t.max[r] * ln_2 + std::log(total);
      each_vector(d, [&, to = o(rows.b, i, head)](std::int64_t j, auto part) {
        part.store(to + j, load(t.o + r * width + j) * splat(scale));
      });
    });
  }
};

}  // namespace

void CpuDevice::attention(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, float scale, const Visible& visible,
                          const Dropout& dropout) {
  const double pairs = check_attention("attention", q, k, v, lse, visible, dropout);
  const std::int64_t B = q.dim(0), n_q = q.dim(1), h = q.dim(2), d = q.dim(3), h_kv = k.dim(2), heads = h / h_kv;
  check_like("attention", "o", o, q);
  const std::int64_t rows = n_q * heads, task_rows = rows_of_task(rows, B * h_kv),
                     chunks = (rows + task_rows - 1) / task_rows;
  Arena measure{nullptr};
  Tile(measure, task_rows, d);
  const Run run(*this, "attention", 4 * pairs * static_cast<double>(d),
                o.bytes() + q.bytes() + k.bytes() + v.bytes() + lse.bytes(), measure.used * threads_);
  if (!run) return;
  with_storage(q.dtype, [&](auto storage) {
    using T = decltype(storage);
    using View = HeadView<T>;
    const Forward<T> forward{View(o),  View(q), View(k), View(v),        lse.as<float>(), n_q,
                             k.dim(1), d,       h,       scale * log2_e, visible,         dropout};
    const auto task = [&](std::int64_t i) {  // the last rows see most and go first
      const std::int64_t chunk = chunks - 1 - std::min(i / (B * h_kv), chunks - 1), b = i % (B * h_kv) / h_kv,
                         kv_head = i % h_kv;
      return Rows{b, kv_head, kv_head * heads, heads, chunk * task_rows, std::min(task_rows, rows - chunk * task_rows)};
    };
#pragma omp parallel for num_threads(threads_) schedule(dynamic)
    for (std::int64_t i = 0; i < B * h_kv * chunks; ++i) {
      Arena arena{run.scratch() + measure.used * omp_get_thread_num()};
      forward.run(task(i), task(i + threads_), Tile(arena, task_rows, d));
    }
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

// Attention, backward (Dao 2022): the probabilities are computed again from the scores and lse. A task owns some heads
// of one K/V head; it goes through the blocks of keys in order, so every sum has one order. Where several tasks share a
// K/V head, each adds up its own dk and dv, which are summed in the order of the tasks at the end.
#include <omp.h>

#include <tuple>

#include "kernels/arguments.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/cpu_device.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

// Rows of a tile.
constexpr std::int64_t row_block = 16 * register_rows;

// Tasks that share a K/V head: enough for tasks to go round, since each costs n_k * d floats twice. Depends on shapes
// only.
std::int64_t tasks_of_kv_head(std::int64_t heads, std::int64_t kv_heads) {
  const std::int64_t tasks = std::min(heads, (12 + kv_heads - 1) / kv_heads), each = (heads + tasks - 1) / tasks;
  return (heads + each - 1) / each;
}

struct Tile {
  float *q, *do_, *dq, *lse, *delta;  // of all rows
  float *k_t, *v_t, *k, *dk, *dv;     // of a block of keys
  float *p, *ds;                      // of a block of rows and keys
  Seen *row, *group;
  Tile(Arena& a, std::int64_t rows, std::int64_t d)
      : q(a.take<float>(rows * padded(d))),
        do_(a.take<float>(rows * padded(d))),
        dq(a.take<float>(rows * padded(d))),
        lse(a.take<float>(rows)),
        delta(a.take<float>(rows)),
        k_t(a.take<float>(d * key_block)),
        v_t(a.take<float>(d * key_block)),
        k(a.take<float>(key_block * padded(d))),
        dk(a.take<float>(key_block * padded(d))),
        dv(a.take<float>(key_block * padded(d))),
        p(a.take<float>(row_block * key_block)),
        ds(a.take<float>(row_block * key_block)),
        row(a.take<Seen>(rows)),
        group(a.take<Seen>(rows / register_rows + 1)) {}
};

template <class T>
struct Backward {
  HeadView<T> dq, dk, dv, do_, o, q, k, v;
  const float* lse;
  std::int64_t n_q, n_k, d, h;
  float scale;
  const Visible& visible;
  const Dropout& dropout;
  KeyDropout draws{dropout};
  std::int64_t width = padded(d);

  // Scores s and dp of row r, vectors [lo, hi) of the block at `key`, become probabilities (dropped) and the gradient
  // of the scores.
  void softmax_row(const Tile& t, std::int64_t b, std::int64_t r, std::int64_t query, std::int64_t head, float* s,
                   float* dp, std::int64_t key, std::int64_t lo, std::int64_t hi) const {
    const Seen& seen = t.row[r];
    const bool masked = !seen.all(key + lo * lanes, key + hi * lanes);
    const f16x c = splat(scale * log2_e), lse_of_row = splat(t.lse[r]), delta = splat(t.delta[r]),
               kept = splat(1 / (1 - dropout.p));
    Philox16 words;
    if (dropout.p > 0) words = draws.words(b, query, head, key);
    for (std::int64_t j = 0; j < key_block / lanes; ++j) {
      f16x p{}, dropped{}, g{};
      if (lo <= j && j < hi) {
        f16x x = load(s + j * lanes) * c - lse_of_row;
        if (masked) x = select(visible_lanes(seen, key + j * lanes), x, splat(-__builtin_inff()));
        p = dropped = exp2(x), g = load(dp + j * lanes);
        if (dropout.p > 0) {
          const i16x keep = draws.keep(words.w[j]);
          dropped = select(keep, p * kept, f16x{}), g = select(keep, g * kept, f16x{});
        }
      }
      store(s + j * lanes, dropped);
      store(dp + j * lanes, p * (g - delta));
    }
  }

  // The gradients of the block of keys at `key` from all rows.
  void block(const Rows& rows, const Rows& next, const Tile& t, std::int64_t key, std::int64_t keys) const {
    std::fill_n(t.dk, key_block * width, 0.0f);
    std::fill_n(t.dv, key_block * width, 0.0f);
    const auto seen_by = [&](std::int64_t r0) {
      Seen seen;
      for (std::int64_t r = r0; r < std::min(r0 + row_block, rows.count); r += register_rows)
        seen.add(t.group[r / register_rows]);
      return seen.any(key, key + keys);
    };
    std::int64_t step = 0, steps = 0;
    for (std::int64_t r0 = 0; r0 < rows.count; r0 += row_block) steps += seen_by(r0) * row_block / register_rows;
    for (std::int64_t r0 = 0; r0 < rows.count; r0 += row_block) {
      const std::int64_t n = std::min(row_block, rows.count - r0), groups = (n + register_rows - 1) / register_rows;
      const Seen* group = t.group + r0 / register_rows;
      if (key == 0) open(rows, t, r0, r0 + n);
      if (!seen_by(r0)) continue;
      const float *q_rows = t.q + r0 * width, *do_rows = t.do_ + r0 * width;
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t r = g * register_rows, high = std::min(register_rows, n - r);
        fetch(rows, next, key, r0 + r, step++, steps);
        float *s = t.p + r * key_block, *ds = t.ds + r * key_block;
        const std::int64_t begin = std::clamp<std::int64_t>(group[g].lo - key, 0, keys),
                           end = std::clamp<std::int64_t>(group[g].hi - key, begin, keys);
        const std::int64_t lo = begin / lanes, hi = begin < end ? (end + lanes - 1) / lanes : lo;
        product<false>(high, (hi - lo) * lanes, d, q_rows + r * width, width, t.k_t + lo * lanes, key_block,
                       s + lo * lanes, key_block, false);
        product<false>(high, (hi - lo) * lanes, d, do_rows + r * width, width, t.v_t + lo * lanes, key_block,
                       ds + lo * lanes, key_block, false);
        rows.each(r0 + r, r0 + r + high,
                  [&, to = std::int64_t{0}](std::int64_t row, std::int64_t query, std::int64_t head) mutable {
                    softmax_row(t, rows.b, row, query, head, s + to, ds + to, key, lo, hi);
                    to += key_block;
                  });
        product<false>(high, width, end - begin, ds + begin, key_block, t.k + begin * width, width,
                       t.dq + (r0 + r) * width, width, true);
      }
      for (std::int64_t j = 0; j < keys; j += register_rows) {  // these keys, from the rows that see one of them
        const std::int64_t high = std::min(register_rows, keys - j);
        std::int64_t first = 0, end = groups;
        while (first < groups && !group[first].any(key + j, key + j + high)) ++first;
        while (end > first && !group[end - 1].any(key + j, key + j + high)) --end;
        first *= register_rows, end = std::min(end * register_rows, n);
        if (first >= end) continue;
        product<true>(high, width, end - first, t.p + first * key_block + j, key_block, do_rows + first * width, width,
                      t.dv + j * width, width, true);
        product<true>(high, width, end - first, t.ds + first * key_block + j, key_block, q_rows + first * width, width,
                      t.dk + j * width, width, true);
      }
    }
  }

  // Brings into the cache, a part at every step of a block of keys, what comes after it: the next keys, and the rows
  // that will be opened.
  void fetch(const Rows& rows, const Rows& next, std::int64_t key, std::int64_t r, std::int64_t step,
             std::int64_t steps) const {
    const auto fetch_rows = [&](const Rows& which, std::int64_t begin, std::int64_t end) {
      which.each(begin, std::min(end, which.count), [&](std::int64_t, std::int64_t i, std::int64_t head) {
        for (const HeadView<T>* x : {&q, &do_, &o}) prefetch((*x)(which.b, i, head), d);
      });
    };
    const bool last = key + key_block >= n_k;
    const Rows& keys_of = last ? next : rows;
    const std::int64_t start = last ? 0 : key + key_block;
    for (std::int64_t j = start + step * key_block / steps; j < std::min(start + (step + 1) * key_block / steps, n_k);
         ++j)
      prefetch(k(keys_of.b, j, keys_of.kv_head), d), prefetch(v(keys_of.b, j, keys_of.kv_head), d);
    if (key == 0) fetch_rows(rows, r + row_block, r + row_block + register_rows);
    if (last) fetch_rows(next, step * row_block / steps, (step + 1) * row_block / steps);
  }

  void open(const Rows& rows, const Tile& t, std::int64_t begin, std::int64_t end) const {
    std::fill(t.dq + begin * width, t.dq + end * width, 0.0f);
    rows.each(begin, end, [&](std::int64_t r, std::int64_t i, std::int64_t head) {
      pack(t.q + r * width, q(rows.b, i, head), d);
      pack(t.do_ + r * width, do_(rows.b, i, head), d);
      f16x delta{};
      each_vector(d, [&, x = t.do_ + r * width, y = o(rows.b, i, head)](std::int64_t j, auto part) {
        delta += load(x + j) * part.load(y + j);
      });
      t.delta[r] = sum(delta);
      t.lse[r] = lse[(rows.b * n_q + i) * h + head] * log2_e;
    });
  }

  // dk and dv go to `partial` [2, n_k, width] when given. `next` is what this thread will probably do afterwards.
  void run(const Rows& rows, const Rows& next, float* partial, const Tile& t) const {
    see(visible, n_k, rows, t.row, t.group);
    for (std::int64_t key = 0; key < n_k; key += key_block) {
      const std::int64_t keys = std::min(key_block, n_k - key);
      const auto k_row = [&](std::int64_t j) { return k(rows.b, key + j, rows.kv_head); };
      pack_transposed(t.k_t, keys, d, k_row);
      pack_transposed(t.v_t, keys, d, [&](std::int64_t j) { return v(rows.b, key + j, rows.kv_head); });
      for (std::int64_t j = 0; j < keys; ++j) pack(t.k + j * width, k_row(j), d);
      block(rows, next, t, key, keys);
      for (std::int64_t j = 0; j < keys; ++j) {
        if (partial) {
          std::copy_n(t.dk + j * width, width, partial + (key + j) * width);
          std::copy_n(t.dv + j * width, width, partial + (n_k + key + j) * width);
        } else {
          write(dk(rows.b, key + j, rows.kv_head), t.dk + j * width, scale);
          write(dv(rows.b, key + j, rows.kv_head), t.dv + j * width, 1);
        }
      }
    }
    rows.each(0, rows.count, [&](std::int64_t r, std::int64_t i, std::int64_t head) {
      write(dq(rows.b, i, head), t.dq + r * width, scale);
    });
  }

  void write(T* to, const float* from, float factor) const {
    each_vector(d, [&](std::int64_t i, auto part) { part.store(to + i, load(from + i) * splat(factor)); });
  }

  // Key j of a K/V head from the parts of its tasks; destroys the first part.
  void add_partials(std::int64_t b, std::int64_t kv_head, std::int64_t j, std::int64_t tasks, float* partial) const {
    for (std::int64_t which = 0; which < 2; ++which) {
      float* total = partial + (which * n_k + j) * width;
      for (std::int64_t task = 1; task < tasks; ++task)
        for (std::int64_t i = 0; i < width; i += lanes)
          store(total + i, load(total + i) + load(total + task * 2 * n_k * width + i));
      write(which ? dv(b, j, kv_head) : dk(b, j, kv_head), total, which ? 1 : scale);
    }
  }
};

}  // namespace

void CpuDevice::attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor do_, Tensor o, Tensor lse, Tensor q,
                                   Tensor k, Tensor v, float scale, const Visible& visible, const Dropout& dropout) {
  const double pairs = check_attention("attention_backward", q, k, v, lse, visible, dropout);
  for (const auto& [name, t, like] :
       {std::tuple{"dq", dq, q}, {"dk", dk, k}, {"dv", dv, v}, {"do", do_, q}, {"o", o, q}})
    check_like("attention_backward", name, t, like);
  const std::int64_t B = q.dim(0), n_q = q.dim(1), h = q.dim(2), d = q.dim(3), n_k = k.dim(1), h_kv = k.dim(2);
  const std::int64_t shared = h / h_kv, tasks = tasks_of_kv_head(shared, B * h_kv),
                     heads = (shared + tasks - 1) / tasks;
  const std::int64_t part = 2 * n_k * padded(d);
  Arena arena{nullptr};
  Tile(arena, n_q * heads, d);
  const std::int64_t tile = arena.used, partials = tasks > 1 ? B * h_kv * tasks * part * 4 : 0;
  const Run run(*this, "attention_backward", 10 * pairs * static_cast<double>(d),
                4 * q.bytes() + 2 * k.bytes() + 2 * v.bytes() + lse.bytes(), tile * threads_ + partials);
  if (!run) return;
  with_storage(q.dtype, [&](auto storage) {
    using T = decltype(storage);
    using View = HeadView<T>;
    const Backward<T> backward{View(dq),        View(dk), View(dv), View(do_), View(o), View(q), View(k), View(v),
                               lse.as<float>(), n_q,      n_k,      d,         h,       scale,   visible, dropout};
    float* partial = tasks > 1 ? reinterpret_cast<float*>(run.scratch() + tile * threads_) : nullptr;
    const auto task = [&](std::int64_t i) {
      const std::int64_t b = std::min(i / (h_kv * tasks), B - 1), kv_head = i / tasks % h_kv, first = i % tasks * heads,
                         count = std::min(heads, shared - first);
      return Rows{b, kv_head, kv_head * shared + first, count, 0, n_q * count};
    };
#pragma omp parallel for num_threads(threads_) schedule(dynamic)
    for (std::int64_t i = 0; i < B * h_kv * tasks; ++i) {
      Arena own{run.scratch() + tile * omp_get_thread_num()};
      backward.run(task(i), task(i + threads_), partial ? partial + i * part : nullptr, Tile(own, n_q * heads, d));
    }
    if (!partial) return;
#pragma omp parallel for num_threads(threads_)
    for (std::int64_t i = 0; i < B * h_kv * n_k; ++i) {
      const std::int64_t b = i / (h_kv * n_k), kv_head = i / n_k % h_kv;
      backward.add_partials(b, kv_head, i % n_k, tasks, partial + (b * h_kv + kv_head) * tasks * part);
    }
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

// Rows of tables: embeddings, positions, and the choice of tokens.
#include "kernels/arguments.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/loops.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

// The tokens of each row of a table, in order: a counting sort by row. Tokens of row r are order[start[r]] ..
// order[start[r + 1] - 1]; tokens whose row is not among the V rows are left out.
struct Buckets {
  std::int64_t *start, *order;

  static std::int64_t bytes(std::int64_t V, std::int64_t n) {
    return (V + 2 + n) * static_cast<std::int64_t>(sizeof(std::int64_t));
  }

  Buckets(char* scratch, const std::int32_t* index, std::int64_t n, std::int64_t first_row, std::int64_t V)
      : start(reinterpret_cast<std::int64_t*>(scratch)), order(start + V + 2) {
    // Counted two places ahead, so that after the second pass start[r] is where row r begins.
    std::fill_n(start, V + 2, 0);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t row = index[i] - first_row;
      if (row >= 0 && row < V) ++start[row + 2];
    }
    for (std::int64_t r = 2; r < V + 2; ++r) start[r] += start[r - 1];
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t row = index[i] - first_row;
      if (row >= 0 && row < V) order[start[row + 1]++] = i;
    }
  }
};

// table[r] (+)= the sum of the rows of x in r's bucket. A piece of a table row is summed by one thread, so a row that
// very many tokens share (a blank) is still the work of several.
void add_buckets(float* table, const float* x, const Buckets& buckets, std::int64_t V, std::int64_t C, Write write,
                 int threads) {
  constexpr std::int64_t width = 256;
  const std::int64_t pieces = (C + width - 1) / width;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 64)
  for (std::int64_t item = 0; item < V * pieces; ++item) {
    const std::int64_t row = item / pieces, first = item % pieces * width, columns = std::min(width, C - first);
    const std::int64_t begin = buckets.start[row], end = buckets.start[row + 1];
    if (begin == end && write == Write::accumulate) continue;
    f16x sum[width / lanes] = {};
    for (std::int64_t i = begin; i < end; ++i) {
      const float* from = x + buckets.order[i] * C + first;
      each_vector(columns, [&](std::int64_t j, auto part) { sum[j / lanes] += part.load(from + j); });
    }
    float* to = table + row * C + first;
    each_vector(columns, [&](std::int64_t j, auto part) {
      const f16x s = sum[j / lanes];
      part.store(to + j, write == Write::accumulate ? part.load(to + j) + s : s);
    });
  }
}

void check_range(const char* operation, const Tensor& index, std::int64_t rows) {
  const auto* i = index.as<std::int32_t>();
  for (std::int64_t k = 0; k < index.numel(); ++k) {
    check(i[k] >= 0 && i[k] < rows, operation, ": element ", k, " of the index is ", i[k], ", the table has ", rows,
          " rows");
  }
}

}  // namespace

void CpuDevice::gather_rows(Tensor out, Tensor table, Tensor index, std::int64_t first_row) {
  expect_activation("gather_rows", "table", table, 2);
  expect("gather_rows",
         {{"index", index, DType::int32, rows_of(out)}, {"out", out, DType::float32, index.numel() * table.dim(-1)}});
  const std::int64_t V = rows_of(table), C = table.dim(-1), n = index.numel();
  Run run(*this, "gather_rows", 0, out.bytes() + n * C * size_of(table.dtype));
  if (!run) return;
  with_storage(table.dtype, [&]<class T>(T) {
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t row = index.as<std::int32_t>()[i] - first_row;
      float* const to = out.as<float>() + i * C;
      if (row >= 0 && row < V)
        each_vector(C, [&, from = table.as<T>() + row * C](std::int64_t j, auto part) {
          part.store(to + j, part.load(from + j));
        });
      else
        std::fill_n(to, C, 0.0f);
    }
  });
}

void CpuDevice::gather_rows_backward(Tensor dtable, Tensor dout, Tensor index, std::int64_t first_row, Write write) {
  const std::int64_t V = dtable.dim(0), C = dtable.dim(-1), n = index.numel();
  expect("gather_rows_backward", {{"dtable", dtable, DType::float32, {V, C}},
                                  {"index", index, DType::int32, index.numel()},
                                  {"dout", dout, DType::float32, n, C}});
  const std::int64_t written = write == Write::overwrite ? dtable.bytes() : 2 * n * C * size_of(DType::float32);
  Run run(*this, "gather_rows_backward", n * C, dout.bytes() + written, Buckets::bytes(V, n));
  if (!run) return;
  const Buckets buckets(run.scratch(), index.as<std::int32_t>(), n, first_row, V);
  add_buckets(dtable.as<float>(), dout.as<float>(), buckets, V, C, write, threads_);
}

void CpuDevice::scatter_rows(Tensor out, Tensor rows, Tensor index) {
  expect_activation("scatter_rows", "out", out, 2);
  expect("scatter_rows", {{"out", out, stream_like(out)},
                          {"index", index, DType::int32, rows_of(rows)},
                          {"rows", rows, DType::float32, index.numel() * out.dim(-1)}});
  Run run(*this, "scatter_rows", 0, out.bytes() + 2 * rows.bytes());
  if (!run) return;
  check_range("scatter_rows", index, rows_of(out));
  zero(out.as<char>(), out.bytes(), threads_);
  const std::int64_t C = out.dim(-1), n = index.numel();
#pragma omp parallel for num_threads(threads_) schedule(static)
  for (std::int64_t i = 0; i < n; ++i)
    std::copy_n(rows.as<float>() + i * C, C, out.as<float>() + index.as<std::int32_t>()[i] * C);
}

void CpuDevice::add_positions(Tensor x, Tensor positions, Tensor wpe, const Dropout& dropout) {
  expect_activation("add_positions", "x", x, 3);
  expect("add_positions", {{"x", x, DType::float32, {x.dim(0), x.dim(1), x.dim(-1)}},
                           {"positions", positions, DType::int32, {x.dim(0), x.dim(1)}},
                           {"wpe", wpe, DType::float32, {wpe.dim(0), x.dim(-1)}}});
  check_dropout("add_positions", dropout, x);
  Run run(*this, "add_positions", x.numel(), 3 * x.bytes());
  if (!run) return;
  check_range("add_positions", positions, wpe.dim(0));
  const std::int64_t C = x.dim(-1);
  each_token(rows_of(x), dropout, threads_, [&](std::int64_t token, auto& drop) {
    float* const row = x.as<float>() + token * C;
    const float* const position = wpe.as<float>() + positions.as<std::int32_t>()[token] * C;
    each_vector(C, [&](std::int64_t i, auto part) {
      part.store(row + i, drop.at(i, part.load(row + i) + part.load(position + i)));
    });
  });
}

void CpuDevice::dropout(Tensor x, const Dropout& dropout) {
  expect_activation("dropout", "x", x, 3);
  expect("dropout", {{"x", x, stream_like(x)}});
  check_dropout("dropout", dropout, x);
  Run run(*this, "dropout", dropout.p > 0 ? x.numel() : 0, dropout.p > 0 ? 2 * x.bytes() : 0);
  if (!run || dropout.p == 0) return;
  const std::int64_t C = x.dim(-1);
  each_token(rows_of(x), dropout, threads_, [&](std::int64_t token, auto& drop) {
    float* const row = x.as<float>() + token * C;
    each_vector(C, [&](std::int64_t i, auto part) { part.store(row + i, drop.at(i, part.load(row + i))); });
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

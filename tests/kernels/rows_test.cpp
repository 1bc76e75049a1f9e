// Rows of tables: embeddings, positions and their gradients, and the choice of tokens.
#include <algorithm>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class Rows : public Contract {};
CONTRACT_SUITE(Rows);

constexpr std::int64_t B = 2, T = 13, n = B * T, V = 29;
constexpr std::int64_t widths[] = {1, 37, 48, 300};  // below, between and beyond the vectors and pieces of a row

std::size_t at(std::int64_t row, std::int64_t column, std::int64_t C) {
  return static_cast<std::size_t>(row * C + column);
}

// Rows that are shared by many tokens, rows that no token has, and rows of another shard on both sides.
Indices tokens() {
  Indices index = random_indices(n, 0, 60, 1);
  for (std::size_t i = 0; i < index.size(); i += 2) index[i] = 21;
  return index;
}
constexpr std::int64_t first_row = 20;
bool inside(std::int32_t index) {
  return index >= first_row && index < first_row + V;
}

TEST_P(Rows, GatherCopiesTheRowsOfThisShard) {
  for (const std::int64_t C : widths) {
    const auto device = make();
    const Values table = randoms(V * C, 2, dtype());
    const Indices index = tokens();
    const Tensor out = garbage(*device, DType::float32, {n, C});
    device->gather_rows(out, put(*device, dtype(), {V, C}, table), put(*device, {n}, index), first_row);
    const Values got = get(*device, out);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t token = index[static_cast<std::size_t>(i)];
      for (std::int64_t c = 0; c < C; ++c)
        ASSERT_EQ(got[at(i, c, C)], inside(token) ? table[at(token - first_row, c, C)] : 0);
    }
  }
}

// dtable[r] = sum of dout over the tokens of r: <gather(table), dout> is linear in the table, so this is its exact
// gradient.
Values gather_gradient(const Indices& index, const Values& dout, std::int64_t C, std::int64_t first,
                       std::int64_t rows) {
  Values d(static_cast<std::size_t>(rows * C), 0.0);
  for (std::size_t i = 0; i < index.size(); ++i) {
    const std::int64_t row = index[i] - first;
    if (row < 0 || row >= rows) continue;
    for (std::int64_t c = 0; c < C; ++c) d[at(row, c, C)] += dout[at(static_cast<std::int64_t>(i), c, C)];
  }
  return d;
}

TEST_P(Rows, GatherGradientIsSummedByRow) {
  for (const std::int64_t C : widths) {
    const Values dout = randoms(n * C, 3), want = gather_gradient(tokens(), dout, C, first_row, V);
    std::vector<Values> results;
    for (int threads = 1; threads <= 3; ++threads) {
      const auto device = make(threads);
      const Tensor dtable = garbage(*device, DType::float32, {V, C}), d = put(*device, DType::float32, {n, C}, dout),
                   index = put(*device, {n}, tokens());
      device->gather_rows_backward(dtable, d, index, first_row, Write::overwrite);
      results.push_back(get(*device, dtable));
      device->gather_rows_backward(dtable, d, index, first_row, Write::accumulate);
      Values twice = want;
      for (double& v : twice) v *= 2;
      EXPECT_LT(relative_error(get(*device, dtable), twice), 1e-6) << C;
    }
    EXPECT_LT(relative_error(results[0], want), 1e-6) << C;  // float32 sums of float32 terms for both types
    EXPECT_EQ(results[1], results[0]);
    EXPECT_EQ(results[2], results[0]);
  }
}

TEST_P(Rows, GatherGradientIsTheNumericOne) {
  const std::int64_t C = 3;
  const Values dout = randoms(n * C, 3), table = randoms(V * C, 4);
  const Indices index = tokens();
  const auto loss = [&](const Values& w) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t token = index[static_cast<std::size_t>(i)];
      for (std::int64_t c = 0; c < C && inside(token); ++c) sum += w[at(token - first_row, c, C)] * dout[at(i, c, C)];
    }
    return sum;
  };
  EXPECT_LT(relative_error(gather_gradient(index, dout, C, first_row, V), numeric_gradient(loss, table)), 1e-8);
}

TEST_P(Rows, NoTokensGiveNoGradient) {
  const auto device = make();
  const Tensor dtable = garbage(*device, DType::float32, {V, 5}),
               none = device->allocate(Kind::workspace, DType::float32, {0, 5}),
               index = device->allocate(Kind::workspace, DType::int32, {0});
  device->gather_rows_backward(dtable, none, index, 0, Write::accumulate);
  EXPECT_EQ(get(*device, dtable), Values(static_cast<std::size_t>(V * 5), 777.0));
  device->gather_rows_backward(dtable, none, index, 0, Write::overwrite);
  EXPECT_EQ(get(*device, dtable), Values(static_cast<std::size_t>(V * 5), 0.0));
}

// Choosing rows and putting them back is the identity on the chosen rows and zero elsewhere.
TEST_P(Rows, ScatterUndoesGather) {
  for (const std::int64_t C : widths) {
    const auto device = make(3);
    const Values x = randoms(n * C, 5);
    const Indices chosen = {25, 3, 0, 11, 4};
    const Tensor some = garbage(*device, DType::float32, {5, C}), out = garbage(*device, DType::float32, {n, C}),
                 index = put(*device, {5}, chosen);
    device->gather_rows(some, put(*device, DType::float32, {n, C}, x), index, 0);
    device->scatter_rows(out, some, index);
    const Values got = get(*device, out);
    for (std::int64_t i = 0; i < n; ++i) {
      const bool kept = std::find(chosen.begin(), chosen.end(), i) != chosen.end();
      for (std::int64_t c = 0; c < C; ++c) ASSERT_EQ(got[at(i, c, C)], kept ? x[at(i, c, C)] : 0);
    }
  }
}

constexpr std::int64_t P = 17;
Indices places() {
  return random_indices(n, 2, P - 1, 6);
}  // repeated in any pattern; rows 0 and 1 have none

Dropout some_dropout(Device& device, float p) {
  return {p, 99, 12345, 3, Site::embedding, 40, 0, put(device, {B, T}, places())};
}

TEST_P(Rows, PositionsAreAddedAndDropped) {
  for (const float p : {0.0f, 0.3f}) {
    for (const std::int64_t C : widths) {
      std::vector<Values> results;
      for (int threads = 1; threads <= 3; ++threads) {
        const auto device = make(threads);
        const Values x = randoms(n * C, 7), wpe = randoms(P * C, 8);
        const Dropout dropout = some_dropout(*device, p);
        const Tensor t = put(*device, DType::float32, {B, T, C}, x);
        device->add_positions(t, dropout.positions, put(*device, DType::float32, {P, C}, wpe), dropout);
        Values want(x.size());
        for (std::int64_t i = 0; i < n; ++i) {
          const std::int32_t position = places()[static_cast<std::size_t>(i)];
          for (std::int64_t c = 0; c < C; ++c) {
            const bool keep = p == 0 || kept(dropout, 40 + i / T, position, c);
            want[at(i, c, C)] = keep ? (x[at(i, c, C)] + wpe[at(position, c, C)]) / (1.0 - p) : 0;
          }
        }
        results.push_back(get(*device, t));
        EXPECT_LT(relative_error(results.back(), want), 1e-6) << p << " " << C;
        for (std::size_t i = 0; i < want.size(); ++i) ASSERT_EQ(results.back()[i] == 0, want[i] == 0);
      }
      EXPECT_EQ(results[1], results[0]);
      EXPECT_EQ(results[2], results[0]);
    }
  }
}

TEST_P(Rows, PositionGradientIsMaskedAndSummedByPosition) {
  for (const float p : {0.0f, 0.3f}) {
    for (const std::int64_t C : widths) {
      std::vector<Values> results;
      for (int threads = 1; threads <= 3; ++threads) {
        const auto device = make(threads);
        Values dx = randoms(n * C, 9);
        const Dropout dropout = some_dropout(*device, p);
        const Tensor t = put(*device, DType::float32, {B, T, C}, dx),
                     dwpe = put(*device, DType::float32, {P, C}, randoms(P * C, 10));
        const Values before = get(*device, dwpe);
        device->dropout(t, dropout);
        device->gather_rows_backward(dwpe, t, dropout.positions, 0, Write::accumulate);
        for (std::int64_t i = 0; i < n; ++i) {
          for (std::int64_t c = 0; c < C; ++c) {
            const bool keep = p == 0 || kept(dropout, 40 + i / T, places()[static_cast<std::size_t>(i)], c);
            dx[at(i, c, C)] = keep ? dx[at(i, c, C)] / (1.0 - p) : 0;
          }
        }
        Values want = gather_gradient(places(), dx, C, 0, P);
        EXPECT_LT(relative_error(get(*device, t), dx), 1e-6);
        const Values added = get(*device, dwpe);
        Values sum = want;
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += before[i];
        EXPECT_LT(relative_error(added, sum), 1e-6);
        device->gather_rows_backward(dwpe, t, dropout.positions, 0, Write::overwrite);
        EXPECT_LT(relative_error(get(*device, dwpe), want), 1e-6);
        results.push_back(added);
      }
      EXPECT_EQ(results[1], results[0]);
      EXPECT_EQ(results[2], results[0]);
    }
  }
}

// A batch cut into rows, and a row cut into shards of the sequence, drop what the whole batch drops.
TEST_P(Rows, DropoutDoesNotSeeTheCut) {
  const std::int64_t C = 48;
  const auto device = make();
  Indices order(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i % T);
  const Values ones(static_cast<std::size_t>(n * C), 1.0);
  const Tensor wpe = device->allocate(Kind::parameters, DType::float32, {T, C});
  const auto run = [&](std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t end) {
    Dropout d{0.5f, 1, 2, 3, Site::embedding, row, 0, {}};
    Indices part;
    for (std::int64_t b = 0; b < rows; ++b) {
      for (std::int64_t t = begin; t < end; ++t) part.push_back(static_cast<std::int32_t>(t));
    }
    d.positions = put(*device, {rows, end - begin}, part);
    const Tensor x = put(*device, DType::float32, {rows, end - begin, C}, Values(part.size() * C, 1.0));
    device->add_positions(x, d.positions, wpe, d);
    return get(*device, x);
  };
  Values whole = run(0, 2, 0, T), first = run(0, 1, 0, T), second = run(1, 1, 0, 5);
  const Values rest = run(1, 1, 5, T);
  first.insert(first.end(), second.begin(), second.end());
  first.insert(first.end(), rest.begin(), rest.end());
  EXPECT_EQ(first, whole);
  // Half of 1248 elements is kept, to five standard deviations of sqrt(n)/2.
  EXPECT_NEAR(static_cast<double>(std::count(whole.begin(), whole.end(), 2.0)), n * C / 2.0, 2.5 * std::sqrt(n * C));
}

TEST_P(Rows, RefusesWhatDoesNotFit) {
  const auto device = make();
  const auto tensor = [&](DType type, Shape shape) { return device->allocate(Kind::workspace, type, shape); };
  const Tensor x = tensor(DType::float32, {n, 8}), table = tensor(DType::float32, {V, 8}),
               index = tensor(DType::int32, {n});
  EXPECT_EQ(sentence([&] { device->gather_rows(x, table, index.slice(0, 0, 5), 0); }),
            "gather_rows: index is int32 [5], expected 26 contiguous elements of int32");
  EXPECT_NE(sentence([&] { device->gather_rows(x.slice(1, 0, 4), table, index, 0); }), "");
  EXPECT_NE(sentence([&] {
              device->gather_rows_backward(tensor(DType::bfloat16, {V, 8}), x, index, 0, Write::overwrite);
            }),
            "");
  EXPECT_NE(sentence([&] {
              device->gather_rows_backward(tensor(DType::float32, {V, 7}), x, index, 0, Write::overwrite);
            }),
            "");
  const Tensor bad = put(*device, {1}, Indices{26});
  EXPECT_EQ(sentence([&] {
              device->scatter_rows(x, tensor(DType::float32, {1, 8}), bad);
            }),
            "scatter_rows: element 0 of the index is 26, the table has 26 rows");
  const Tensor bth = tensor(DType::float32, {B, T, 8}), positions = tensor(DType::int32, {B, T});
  EXPECT_NE(sentence([&] { device->add_positions(bth, index, table, {}); }), "");
  EXPECT_NE(sentence([&] { device->add_positions(tensor(DType::float32, {B, T, 2, 8}), positions, table, {}); }), "");
  EXPECT_NE(sentence([&] { device->add_positions(bth, positions, table.slice(1, 0, 4), {}); }), "");
  Dropout dropout{1.0f, 0, 0, 0, Site::embedding, 0, 0, positions};
  EXPECT_EQ(sentence([&] { device->add_positions(bth, positions, table, dropout); }),
            "add_positions: the dropout probability 1 must be at least 0 and below 1");
  dropout.p = 0.5f;
  dropout.positions = {};
  EXPECT_NE(sentence([&] { device->add_positions(bth, positions, table, dropout); }), "");
}

}  // namespace
}  // namespace onescale::contract

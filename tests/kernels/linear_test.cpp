// Products against plain float64 loops.
#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class Linear : public Contract {};

struct Sizes {
  std::int64_t n, in, out;
};

// Below, at and above every boundary of a blocked product: tiles of 6, 8, 14, 16 and 32, groups of 64, a depth of 768.
const std::vector<Sizes> all_sizes = {{1, 1, 1},      {1, 37, 99},   {3, 99, 7},    {4, 64, 33},   {5, 1, 31},
                                      {7, 37, 99},    {14, 16, 32},  {15, 17, 33},  {64, 48, 64},  {99, 7, 37},
                                      {6, 5, 1},      {37, 769, 70}, {29, 1600, 9}, {70, 33, 801}, {800, 65, 40},
                                      {131, 24, 300}, {33, 200, 1}};

// c [M, N] = sum over k of a(i, k) b(k, j).
Values product(std::int64_t M, std::int64_t N, std::int64_t K,
               const std::function<double(std::int64_t, std::int64_t)>& a,
               const std::function<double(std::int64_t, std::int64_t)>& b) {
  Values c(static_cast<std::size_t>(M * N));
  for (std::int64_t i = 0; i < M; ++i) {
    for (std::int64_t k = 0; k < K; ++k) {
      const double x = a(i, k);
      for (std::int64_t j = 0; j < N; ++j) c[static_cast<std::size_t>(i * N + j)] += x * b(k, j);
    }
  }
  return c;
}

// The values of a matrix between rows of NaN that must reach nothing.
Tensor put_between(Device& device, DType dtype, std::array<std::int64_t, 2> shape, const Values& values) {
  const auto [n, columns] = shape;
  Values tall(static_cast<std::size_t>((n + 2) * columns), std::nan(""));
  std::copy(values.begin(), values.end(), tall.begin() + columns);
  return put(device, dtype, {n + 2, columns}, tall).slice(0, 1, n + 1);
}

struct Case {
  Sizes s;
  Values x, W, b, dy;
  Case(Sizes sizes, DType dtype)
      : s(sizes),
        x(randoms(s.n * s.in, 1, dtype)),
        W(randoms(s.out * s.in, 2, dtype)),
        b(randoms(s.out, 3)),
        dy(randoms(s.n * s.out, 4, dtype)) {}
  double at(const Values& v, std::int64_t i, std::int64_t j, std::int64_t columns) const {
    return v[static_cast<std::size_t>(i * columns + j)];
  }
  Values y(bool bias) const {
    Values y = product(
        s.n, s.out, s.in, [&](auto i, auto k) { return at(x, i, k, s.in); },
        [&](auto k, auto j) { return at(W, j, k, s.in); });
    for (std::size_t i = 0; bias && i < y.size(); ++i) y[i] += b[i % b.size()];
    return y;
  }
  Values dx() const {
    return product(
        s.n, s.in, s.out, [&](auto i, auto k) { return at(dy, i, k, s.out); },
        [&](auto k, auto j) { return at(W, k, j, s.in); });
  }
  Values dW() const {
    return product(
        s.out, s.in, s.n, [&](auto i, auto k) { return at(dy, k, i, s.out); },
        [&](auto k, auto j) { return at(x, k, j, s.in); });
  }
  Values db() const {
    Values db(b.size());
    for (std::size_t i = 0; i < dy.size(); ++i) db[i % db.size()] += dy[i];
    return db;
  }
  std::string name() const { return str("n ", s.n, " in ", s.in, " out ", s.out); }
};

// Leaves NaN in the scratch of later operations.
void poison_scratch(Device& device, DType dtype) {
  const auto nan = [&](std::int64_t n, std::int64_t c) {
    return put(device, dtype, {n, c}, Values(static_cast<std::size_t>(n * c), std::nan("")));
  };
  device.linear(garbage(device, dtype, {900, 900}), nan(900, 900), nan(900, 900), {});
}

TEST_P(Linear, ForwardOfEverySizeWithAndWithoutBias) {
  auto device = make();
  poison_scratch(*device, dtype());
  for (const Sizes& s : all_sizes) {
    const Case c(s, dtype());
    const Tensor x = put_between(*device, dtype(), {s.n, s.in}, c.x);
    const Tensor W = put_between(*device, dtype(), {s.out, s.in}, c.W), b = put(*device, DType::float32, {s.out}, c.b);
    const Tensor wide = garbage(*device, dtype(), {s.n + 2, s.out}), y = wide.slice(0, 1, s.n + 1);
    device->linear(y, x, W, {});
    EXPECT_LT(relative_error(get(*device, y), c.y(false)), tolerance()) << c.name();
    device->linear(y, x, W, b);
    EXPECT_LT(relative_error(get(*device, y), c.y(true)), tolerance()) << c.name();
    // Rows beside y are another tensor's.
    for (const std::int64_t row : {std::int64_t{0}, s.n + 1}) {
      for (const double v : get(*device, wide.slice(0, row, row + 1))) EXPECT_EQ(v, rounded({777.0}, dtype())[0]);
    }
  }
}

TEST_P(Linear, BackwardOfEverySizeOverwritesAndAccumulates) {
  auto device = make();
  poison_scratch(*device, dtype());
  for (const Sizes& s : all_sizes) {
    const Case c(s, dtype());
    const Values want_dW = c.dW(), want_db = c.db();
    const Tensor x = put_between(*device, dtype(), {s.n, s.in}, c.x);
    const Tensor dy = put_between(*device, dtype(), {s.n, s.out}, c.dy);
    const Tensor W = put_between(*device, dtype(), {s.out, s.in}, c.W);
    const Tensor dx = garbage(*device, dtype(), {s.n, s.in});
    const Tensor dW = garbage(*device, DType::float32, {s.out, s.in}), db = garbage(*device, DType::float32, {s.out});
    device->linear_backward(dx, dW, db, dy, x, W, Write::overwrite);
    // Gradients of weights are float32 whatever the activations are: sums of at most 800 products.
    EXPECT_LT(relative_error(get(*device, dx), c.dx()), tolerance()) << c.name();
    EXPECT_LT(relative_error(get(*device, dW), want_dW), 1e-5) << c.name();
    EXPECT_LT(relative_error(get(*device, db), want_db), 1e-5) << c.name();
    device->linear_backward(dx, dW, db, dy, x, W, Write::accumulate);
    Values twice_dW = want_dW, twice_db = want_db;
    for (double& v : twice_dW) v *= 2;
    for (double& v : twice_db) v *= 2;
    EXPECT_LT(relative_error(get(*device, dx), c.dx()), tolerance()) << c.name();
    EXPECT_LT(relative_error(get(*device, dW), twice_dW), 1e-5) << c.name();
    EXPECT_LT(relative_error(get(*device, db), twice_db), 1e-5) << c.name();
  }
}

TEST_P(Linear, SameBitsForAnyNumberOfThreads) {
  for (const Sizes& s : {Sizes{37, 800, 130}, Sizes{200, 50, 60}, Sizes{2, 33, 130}}) {
    const Case c(s, dtype());
    Values first;
    for (const int threads : {1, 2, 3, 16}) {
      auto device = make(threads);
      const Tensor x = put(*device, dtype(), {s.n, s.in}, c.x), W = put(*device, dtype(), {s.out, s.in}, c.W);
      const Tensor dy = put(*device, dtype(), {s.n, s.out}, c.dy);
      const Tensor y = garbage(*device, dtype(), {s.n, s.out}), dx = garbage(*device, dtype(), {s.n, s.in});
      const Tensor dW = garbage(*device, DType::float32, {s.out, s.in}), db = garbage(*device, DType::float32, {s.out});
      device->linear(y, x, W, {});
      device->linear_backward(dx, dW, db, dy, x, W, Write::overwrite);
      Values all = get(*device, y);
      for (const Tensor& t : {dx, dW, db}) {
        const Values v = get(*device, t);
        all.insert(all.end(), v.begin(), v.end());
      }
      if (first.empty()) first = all;
      EXPECT_EQ(all, first) << threads << " threads, " << c.name();
    }
  }
}

// What a token becomes does not depend on the tokens beside it. (Up to four tokens are computed by another loop.)
TEST_P(Linear, SameBitsForATokenInAnyBatch) {
  auto device = make();
  const Case c({100, 800, 130}, dtype());
  const Tensor x = put(*device, dtype(), {100, 800}, c.x), W = put(*device, dtype(), {130, 800}, c.W);
  const Tensor whole = garbage(*device, dtype(), {100, 130}), part = garbage(*device, dtype(), {9, 130});
  device->linear(whole, x, W, {});
  device->linear(part, x.slice(0, 50, 59), W, {});
  EXPECT_EQ(get(*device, part), get(*device, whole.slice(0, 50, 59)));
}

TEST_P(Linear, NoTokens) {
  auto device = make();
  const Tensor W = put(*device, dtype(), {3, 2}, Values(6, 1.0));
  const Tensor none_in(nullptr, dtype(), {0, 2}), none_out(nullptr, dtype(), {0, 3});
  const Tensor dW = garbage(*device, DType::float32, {3, 2}), db = garbage(*device, DType::float32, {3});
  device->linear(none_out, none_in, W, {});
  device->linear_backward(none_in, dW, db, none_out, none_in, W, Write::accumulate);
  EXPECT_EQ(get(*device, dW), Values(6, 777.0));
  device->linear_backward(none_in, dW, db, none_out, none_in, W, Write::overwrite);
  EXPECT_EQ(get(*device, dW), Values(6, 0.0));
  EXPECT_EQ(get(*device, db), Values(3, 0.0));
}

// A dry run finds the scratch that the run then takes, to the byte, and the same work.
TEST_P(Linear, DryRunFindsTheScratch) {
  for (const Sizes& s : all_sizes) {
    auto dry = make(2, true), wet = make(2, false);
    const auto step = [&](Device& device) {
      const auto tensor = [&](DType type, Shape shape) { return device.allocate(Kind::workspace, type, shape); };
      const Tensor x = tensor(dtype(), {s.n, s.in}), W = tensor(dtype(), {s.out, s.in}),
                   y = tensor(dtype(), {s.n, s.out});
      device.linear(y, x, W, tensor(DType::float32, {s.out}));
      device.linear_backward(x, tensor(DType::float32, {s.out, s.in}), {}, y, x, W, Write::overwrite);
      return device.memory()[static_cast<std::size_t>(Kind::kernel_scratch)];
    };
    std::vector<double> flops, wet_flops;
    dry->trace([&](const Operation& o) { flops.push_back(o.flops); });
    wet->trace([&](const Operation& o) { wet_flops.push_back(o.flops); });
    const std::int64_t found = step(*dry);
    EXPECT_EQ(step(*wet), found);
    EXPECT_EQ(wet_flops, flops);
    wet = make(2, false);
    wet->reserve_scratch(found);
    EXPECT_NO_THROW(step(*wet));
    const double product = 2.0 * static_cast<double>(s.n * s.in * s.out);
    EXPECT_EQ(flops, (std::vector{product, 2 * product}));
  }
}

TEST_P(Linear, WrongShapesAreSentences) {
  auto device = make();
  const Tensor x = garbage(*device, dtype(), {5, 4}), W = garbage(*device, dtype(), {3, 4}),
               y = garbage(*device, dtype(), {5, 3});
  const Tensor dW = garbage(*device, DType::float32, {3, 4});
  EXPECT_NE(sentence([&] { device->linear(y, y, W, {}); }).find("linear: x is"), std::string::npos);
  EXPECT_NE(sentence([&] { device->linear(x, x, W, {}); }).find("linear: y is"), std::string::npos);
  EXPECT_NE(sentence([&] { device->linear(y, x, W, x); }).find("linear: b is"), std::string::npos);
  EXPECT_NE(sentence([&] { device->linear(y.view({3, 5}), x, W, {}); }).find("linear: y is"), std::string::npos);
  EXPECT_NE(sentence([&] { device->linear(y.view({15}), x, W, {}); }).find("linear: y is"), std::string::npos);
  EXPECT_NE(sentence([&] { device->linear(y, x, W.view({3, 2, 2}), {}); }).find("linear: W is"), std::string::npos);
  EXPECT_NE(sentence([&] { device->linear_backward(x, dW, {}, x, x, W, Write::overwrite); }).find("dy is"),
            std::string::npos);
  EXPECT_NE(sentence([&] { device->linear_backward(y, dW, {}, y, x, W, Write::overwrite); }).find("dx is"),
            std::string::npos);
}

CONTRACT_SUITE(Linear);

}  // namespace
}  // namespace onescale::contract

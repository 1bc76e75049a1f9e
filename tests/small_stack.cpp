// Every operation at the sizes of real models, run by ctest with a stack of 256 KiB for each thread: nothing that grows
// with a row, a head or a vocabulary may lie on it. The results are known in closed form.
#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

constexpr std::int64_t V = 50304, C = 6144, T = 8192;

class SmallStack : public Contract {
 protected:
  void SetUp() override {
    Contract::SetUp();
    if (!IsSkipped()) device = make();
  }
  Tensor full(DType type, Shape shape, float value) {
    const Tensor t = device->allocate(Kind::workspace, type, shape);
    device->fill(t, value);
    return t;
  }
  Tensor full(Shape shape, float value) { return full(dtype(), shape, value); }
  Tensor zeros(DType type, Shape shape) { return device->allocate(Kind::workspace, type, shape); }
  Tensor counting(Shape shape, std::int64_t first, std::int64_t step) {
    const Tensor t = zeros(DType::int32, shape);
    Indices values(static_cast<std::size_t>(t.numel()));
    for (auto& v : values) v = static_cast<std::int32_t>(first), first += step;
    device->upload(t, values.data());
    return t;
  }
  // All elements are this, to a relative error.
  void expect_all(const Tensor& t, double value, double error) {
    const Values got = get(*device, t);
    const auto [low, high] = std::minmax_element(got.begin(), got.end());
    EXPECT_NEAR(*low, value, error * std::abs(value)) << t.describe();
    EXPECT_NEAR(*high, value, error * std::abs(value)) << t.describe();
  }
  std::unique_ptr<Device> device;
};
CONTRACT_SUITE(SmallStack);

TEST_P(SmallStack, Vocabulary) {
  const Tensor logits = full({5, V}, 1), stats = zeros(DType::float32, {5, 3}), labels = counting({5}, V - 5, 1),
               loss = zeros(DType::float32, {5});
  device->softmax_statistics(stats, logits, labels, 0, V);
  device->combine_statistics(stats, stats.view({1, 5, 3}));
  device->cross_entropy(loss, logits, stats, labels, 0, V, 0.5f);
  expect_all(loss, std::log(static_cast<double>(V)), 1e-6);
  const Values gradient = get(*device, logits);
  EXPECT_NEAR(gradient[0] * V, 0.5, 0.5 * 0x1p-8);  // one rounding of bfloat16
  EXPECT_NEAR(gradient[static_cast<std::size_t>(V - 5)], 0.5 / static_cast<double>(V) - 0.5, 1e-5);

  const Tensor table = full({V, 16}, 3), out = zeros(DType::float32, {9, 16}), index = counting({9}, 0, V / 9),
               dtable = full(DType::float32, {V, 16}, 2), x = full({9, 16}, 1);
  device->gather_rows(out, table, index, 0);
  expect_all(out, 3, 0);
  device->gather_rows_backward(dtable, out, index, 0, Write::accumulate);
  EXPECT_EQ(get(*device, dtable)[0], 5);
  const Tensor y = zeros(dtype(), {9, V}), dx = zeros(dtype(), {9, 16});
  device->linear(y, x, table, {});
  expect_all(y, 48, 0);
  device->linear_backward(dx, dtable, {}, y, x, table, Write::overwrite);
  expect_all(dx, 144.0 * V, 1e-5 + (dtype() == DType::bfloat16 ? 0x1p-8 : 0));
  expect_all(dtable, 9 * 48, 0);
  device->scatter_rows(dtable, out, index);
}

TEST_P(SmallStack, Width) {
  const Tensor x = full(DType::float32, {2, 3, C}, 2), y = full({2, 3, C}, 1), out = zeros(DType::float32, {2, 3, C}),
               norm = full({2, 3, C}, 1), w = full(DType::float32, {C}, 1), b = full(DType::float32, {C}, 0.5f),
               mean = zeros(DType::float32, {2, 3}), rstd = zeros(DType::float32, {2, 3}),
               dw = zeros(DType::float32, {C}), db = zeros(DType::float32, {C}), positions = counting({2, 3}, 0, 1),
               wpe = full(DType::float32, {8, C}, 1);
  const Dropout off, half{0.5f, 1, 2, 3, Site::mlp_output, 4, 0, positions};
  device->residual_layernorm(out, norm, mean, rstd, x, y, b, w, b, 1e-5f, off);
  expect_all(out, 3.5, 0);
  expect_all(mean, 3.5, 0);
  expect_all(norm, 0.5, 0);
  device->layernorm(norm, mean, rstd, x, w, b, 1e-5f);
  device->layernorm_backward(out, dw, db, y, x, mean, rstd, w, Write::overwrite);
  expect_all(db, 6, 0);
  device->residual(out, x, y, b, half);
  device->residual_backward(y, db, x, half, Write::overwrite);
  device->dropout(out, half);
  device->add_positions(x, positions, wpe, half);
  device->gelu(y, full({2, 3, C}, 10), Gelu::tanh);
  expect_all(y, 10, 0);
  const Tensor slope = full({2, 3, C}, 1);
  device->gelu_backward(slope, db, y, Gelu::erf, Write::overwrite);
  expect_all(db, 6, 0);

  const Tensor in = full({6, C}, 1), W = full({48, C}, 1), small = zeros(dtype(), {6, 48}),
               wide = zeros(dtype(), {6, C}), dW = zeros(DType::float32, {48, C}), bias = full(DType::float32, {48}, 2),
               dbias = zeros(DType::float32, {48});
  device->linear(small, in, W, bias);
  expect_all(small, C + 2, dtype() == DType::bfloat16 ? 0x1p-8 : 0);
  device->fill(small, 1);
  device->linear_backward(wide, dW, dbias, small, in, W, Write::overwrite);
  expect_all(wide, 48, 0);
  expect_all(dW, 6, 0);
  const Tensor moments = zeros(DType::float32, {48, C}), g = full(DType::float32, {48, C}, 1);
  device->adamw(dW, moments, zeros(DType::float32, {48, C}), g, W, {1, 0.9f, 0.95f, 1e-8f, 0, 1, 1});
  expect_all(dW, 5, 1e-6);
  device->sgd(dW, g, W, 1, 0, 1);
  expect_all(dW, 4, 1e-6);
  device->random_normal(dW, 1, 2, 3, 1);
  device->copy(W, dW);
  device->sum_pieces(dW, {g, g, g}, Write::overwrite);
  expect_all(dW, 3, 0);
  const Tensor total = zeros(DType::float64, {1});
  device->sum(total, dW, Write::overwrite);
  device->sum_of_squares(total, dW, Write::accumulate);
  expect_all(total, 12.0 * 48 * C, 0);
}

// Values are 1, so that a mean of values is 1 whatever the probabilities are, and no score has a gradient.
TEST_P(SmallStack, Sequence) {
  const Tensor qkv = full({1, T, 32}, 1), q = qkv.slice(2, 0, 16).split_last(1, 16),
               kv = qkv.slice(2, 16, 32).split_last(1, 16), o = zeros(dtype(), {1, T, 1, 16}),
               lse = zeros(DType::float32, {1, T, 1}), first = zeros(DType::int32, {1, T}),
               last = counting({1, T}, 0, 1), dq = zeros(dtype(), {1, T, 1, 16}), dk = zeros(dtype(), {1, T, 1, 16}),
               dv = zeros(dtype(), {1, T, 1, 16});
  for (const float p : {0.0f, 0.1f}) {
    const Dropout dropout{p, 1, 2, 3, Site::attention, 0, 0, last};
    device->attention(o, lse, q, kv, kv, 0.25f, {first, last}, dropout);
    device->attention_backward(dq, dk, dv, q, o, lse, q, kv, kv, 0.25f, {first, last}, dropout);
    if (p > 0) continue;
    expect_all(o, 1, 1e-5);
    // The probabilities of query i are 1 / (i + 1), so the last key gets 1 / T.
    EXPECT_NEAR(get(*device, dv).back() * static_cast<double>(T), 1, 0x1p-8);
  }
}

}  // namespace
}  // namespace onescale::contract

// AdamW and SGD against their formulas in float64.
#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class Optimizer : public Float32Contract {};
FLOAT32_CONTRACT_SUITE(Optimizer);

struct State {
  Values w, m, v;
};

// torch.optim.AdamW, as its documentation writes it: w (1 - lr decay) first, then the step by the corrected moments.
void reference(State& s, const Values& g, const AdamW& a) {
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double d = g[i] * a.gradient_scale;
    s.w[i] -= static_cast<double>(a.lr) * a.weight_decay * s.w[i];
    s.m[i] = a.beta1 * s.m[i] + (1 - static_cast<double>(a.beta1)) * d;
    s.v[i] = a.beta2 * s.v[i] + (1 - static_cast<double>(a.beta2)) * d * d;
    const double m_hat = s.m[i] / (1 - std::pow(static_cast<double>(a.beta1), a.count));
    const double v_hat = s.v[i] / (1 - std::pow(static_cast<double>(a.beta2), a.count));
    s.w[i] -= a.lr * m_hat / (std::sqrt(v_hat) + a.eps);
  }
}

// Ten steps at several lengths. The update of a step is a few float32 operations on float32 state: 1e-6 of the norm of
// each.
TEST_P(Optimizer, AdamWFollowsItsFormula) {
  for (const std::int64_t n : {1, 37, 4096, 10001}) {
    const auto device = make(2, false);
    State want{randoms(n, 1), Values(static_cast<std::size_t>(n), 0.0), Values(static_cast<std::size_t>(n), 0.0)};
    const Values start = want.w;
    const Tensor w = put(*device, DType::float32, {n}, want.w), m = put(*device, DType::float32, {n}, want.m),
                 v = put(*device, DType::float32, {n}, want.v), compute = garbage(*device, DType::bfloat16, {n});
    for (int step = 1; step <= 10; ++step) {
      const AdamW settings{0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 0.5f};
      const Values g = randoms(n, static_cast<unsigned>(100 + step));
      reference(want, g, settings);
      device->adamw(w, m, v, put(*device, DType::float32, {n}, g), compute, settings);
    }
    const Values got = get(*device, w);
    EXPECT_LT(relative_error(got, want.w), 1e-6) << n;
    EXPECT_LT(relative_error(get(*device, m), want.m), 1e-6) << n;
    EXPECT_LT(relative_error(get(*device, v), want.v), 1e-6) << n;
    EXPECT_EQ(get(*device, compute), rounded(got, DType::bfloat16)) << n;
    Values moved = want.w, made = got;
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] -= start[i], made[i] -= start[i];
    EXPECT_LT(relative_error(made, moved), 1e-5) << n;  // the movement is a tenth of the weights
  }
}

// The first step of Adam is lr times the sign of the gradient, whatever its size.
TEST_P(Optimizer, AdamWFirstStepIsTheSign) {
  const auto device = make(1, false);
  const Tensor w = put(*device, DType::float32, {4}, {1, 1, 1, 1}),
               m = device->allocate(Kind::optimizer, DType::float32, {4}),
               v = device->allocate(Kind::optimizer, DType::float32, {4}),
               g = put(*device, DType::float32, {4}, {5, -3e-3, 1e4, 0});
  device->adamw(w, m, v, g, {}, AdamW{0.125f, 0.9f, 0.999f, 1e-12f, 0, 1, 1});
  const Values got = get(*device, w), want = {0.875, 1.125, 0.875, 1};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(got[i], want[i], 1e-6);
}

TEST_P(Optimizer, AnyShardingAndThreadsGiveTheSameBits) {
  const std::int64_t n = 9001;
  const AdamW settings{0.003f, 0.9f, 0.95f, 1e-8f, 0.1f, 3, 0.7f};
  const auto run = [&](int threads, const std::vector<std::int64_t>& cuts, bool adam) {
    const auto device = make(threads, false);
    const Tensor w = put(*device, DType::float32, {n}, randoms(n, 1)),
                 m = put(*device, DType::float32, {n}, randoms(n, 2)),
                 g = put(*device, DType::float32, {n}, randoms(n, 4));
    Values positive = randoms(n, 3);
    for (double& x : positive) x = std::abs(x);
    const Tensor v = put(*device, DType::float32, {n}, positive);
    std::int64_t begin = 0;
    for (const std::int64_t end : cuts) {
      const auto part = [&](const Tensor& t) { return t.slice(0, begin, end); };
      if (adam)
        device->adamw(part(w), part(m), part(v), part(g), {}, settings);
      else
        device->sgd(part(w), part(g), {}, 0.1f, 0.01f, 0.7f);
      begin = end;
    }
    return get(*device, w);
  };
  for (const bool adam : {true, false}) {
    const Values whole = run(1, {n}, adam);
    EXPECT_EQ(run(3, {n}, adam), whole);
    EXPECT_EQ(run(2, {1, 18, 4000, n}, adam), whole);
  }
}

TEST_P(Optimizer, SgdFollowsItsFormula) {
  const std::int64_t n = 5003;
  const auto device = make(2, false);
  const Values start = randoms(n, 1), g = randoms(n, 2);
  const Tensor w = put(*device, DType::float32, {n}, start), compute = garbage(*device, DType::bfloat16, {n});
  device->sgd(w, put(*device, DType::float32, {n}, g), compute, 0.1f, 0.01f, 0.5f);
  Values want = start;
  for (std::size_t i = 0; i < want.size(); ++i) want[i] -= 0.1f * (0.5 * g[i] + 0.01f * start[i]);
  EXPECT_LT(relative_error(get(*device, w), want), 1e-6);
  EXPECT_EQ(get(*device, compute), rounded(get(*device, w), DType::bfloat16));
}

// lr 1 without decay is how a gradient is read back from a weight change: exact where the difference is.
TEST_P(Optimizer, SgdWithRateOneSubtractsTheGradient) {
  const auto device = make(2, false);
  const Tensor w = put(*device, DType::float32, {3}, {1, 2, 3});
  device->sgd(w, put(*device, DType::float32, {3}, {0.25, -0.5, 4}), {}, 1, 0, 1);
  EXPECT_EQ(get(*device, w), (Values{0.75, 2.5, -1}));
}

TEST_P(Optimizer, RefusesWhatDoesNotFit) {
  const auto device = make(1, false);
  const Tensor a = device->allocate(Kind::workspace, DType::float32, {4}),
               b = device->allocate(Kind::workspace, DType::float32, {5});
  const AdamW settings{0.1f, 0.9f, 0.95f, 1e-8f, 0, 1, 1};
  EXPECT_EQ(sentence([&] { device->adamw(a, a, b, a, {}, settings); }),
            "adamw: v is float32 [5], expected 4 contiguous elements of float32");
  AdamW zero = settings;
  zero.count = 0;
  EXPECT_NE(sentence([&] { device->adamw(a, a, a, a, {}, zero); }), "");
  EXPECT_NE(sentence([&] { device->sgd(a, a, device->allocate(Kind::workspace, DType::bfloat16, {3}), 1, 0, 1); }), "");
}

}  // namespace
}  // namespace onescale::contract

// Layer normalisation and the residual stream against float64 references.
#include <algorithm>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class LayerNorm : public Contract {};
CONTRACT_SUITE(LayerNorm);

constexpr float eps = 1e-5f;

struct Normalised {
  Values y, mean, rstd;
};

Normalised normalise(const Values& x, const Values& w, const Values& b) {
  const std::size_t C = w.size(), n = x.size() / C;
  Normalised out{Values(x.size()), Values(n), Values(n)};
  for (std::size_t i = 0; i < n; ++i) {
    double mean = 0, variance = 0;
    for (std::size_t c = 0; c < C; ++c) mean += x[i * C + c] / static_cast<double>(C);
    for (std::size_t c = 0; c < C; ++c)
      variance += (x[i * C + c] - mean) * (x[i * C + c] - mean) / static_cast<double>(C);
    out.mean[i] = mean;
    out.rstd[i] = 1 / std::sqrt(variance + static_cast<double>(eps));
    for (std::size_t c = 0; c < C; ++c) out.y[i * C + c] = (x[i * C + c] - mean) * out.rstd[i] * w[c] + b[c];
  }
  return out;
}

struct Gradients {
  Values dx, dw, db;
};

Gradients normalise_backward(const Values& dy, const Values& x, const Values& w) {
  const std::size_t C = w.size(), n = x.size() / C;
  const Normalised s = normalise(x, w, w);
  Gradients out{Values(x.size()), Values(C, 0.0), Values(C, 0.0)};
  for (std::size_t i = 0; i < n; ++i) {
    double g_mean = 0, gx_mean = 0;
    for (std::size_t c = 0; c < C; ++c) {
      const double d = dy[i * C + c], normal = (x[i * C + c] - s.mean[i]) * s.rstd[i];
      out.dw[c] += d * normal;
      out.db[c] += d;
      g_mean += d * w[c] / static_cast<double>(C);
      gx_mean += d * w[c] * normal / static_cast<double>(C);
    }
    for (std::size_t c = 0; c < C; ++c) {
      const double normal = (x[i * C + c] - s.mean[i]) * s.rstd[i];
      out.dx[i * C + c] = s.rstd[i] * (dy[i * C + c] * w[c] - g_mean - normal * gx_mean);
    }
  }
  return out;
}

TEST(LayerNormReference, GradientIsTheNumericOne) {
  const Values x = randoms(4 * 7, 1), w = randoms(7, 2), b = randoms(7, 3), dy = randoms(4 * 7, 4);
  const Gradients g = normalise_backward(dy, x, w);
  EXPECT_LT(relative_error(g.dx, numeric_gradient([&](const Values& v) { return dot(normalise(v, w, b).y, dy); }, x)),
            1e-7);
  EXPECT_LT(relative_error(g.dw, numeric_gradient([&](const Values& v) { return dot(normalise(x, v, b).y, dy); }, w)),
            1e-7);
  EXPECT_LT(relative_error(g.db, numeric_gradient([&](const Values& v) { return dot(normalise(x, w, v).y, dy); }, b)),
            1e-7);
}

constexpr std::int64_t widths[] = {2, 37, 48, 99, 200};  // below and between vectors, and beyond four of them
constexpr std::int64_t B = 2;
constexpr std::int64_t lengths[] = {1, 13, 40};  // 80 tokens are more than two blocks of a column sum

TEST_P(LayerNorm, NormalisesRows) {
  for (const std::int64_t C : widths) {
    for (const std::int64_t T : lengths) {
      const Values x = randoms(B * T * C, 1, DType::float32, 3), w = randoms(C, 2), b = randoms(C, 3);
      const Normalised want = normalise(x, w, b);
      std::vector<Values> results;
      for (int threads = 1; threads <= 3; ++threads) {
        const auto device = make(threads);
        const Tensor y = garbage(*device, dtype(), {B, T, C}), mean = garbage(*device, DType::float32, {B, T}),
                     rstd = garbage(*device, DType::float32, {B * T});
        device->layernorm(y, mean, rstd, put(*device, DType::float32, {B, T, C}, x),
                          put(*device, DType::float32, {C}, w), put(*device, DType::float32, {C}, b), eps);
        results.push_back(get(*device, y));
        EXPECT_LT(relative_error(results.back(), want.y), tolerance()) << C << " " << T;
        EXPECT_LT(relative_error(get(*device, mean), want.mean), 1e-5);
        EXPECT_LT(relative_error(get(*device, rstd), want.rstd), 1e-5);
      }
      EXPECT_EQ(results[1], results[0]);
      EXPECT_EQ(results[2], results[0]);
    }
  }
}

// A mean of 1000 standard deviations: float32 holds x to 6e-5 of a deviation, the statistics in two sweeps lose nothing
// more. E[x^2] - E[x]^2 would.
TEST_P(LayerNorm, SurvivesALargeMean) {
  const std::int64_t C = 768;
  Values x = randoms(3 * C, 1), one(static_cast<std::size_t>(C), 1.0), zero(static_cast<std::size_t>(C), 0.0);
  for (double& v : x) v += 1000;
  x = rounded(x, DType::float32);
  const auto device = make();
  const Tensor y = garbage(*device, dtype(), {3, C}), mean = garbage(*device, DType::float32, {3}),
               rstd = garbage(*device, DType::float32, {3});
  device->layernorm(y, mean, rstd, put(*device, DType::float32, {3, C}, x), put(*device, DType::float32, {C}, one),
                    put(*device, DType::float32, {C}, zero), eps);
  EXPECT_LT(relative_error(get(*device, y), normalise(x, one, zero).y), std::max(1e-4, tolerance()));
}

TEST_P(LayerNorm, GradientIsAddedToDx) {
  for (const std::int64_t C : widths) {
    for (const std::int64_t T : lengths) {
      const std::int64_t n = B * T;
      const Values x = randoms(n * C, 1, DType::float32, 3), w = randoms(C, 2), dy = randoms(n * C, 4, dtype()),
                   start = randoms(n * C, 5);
      const Normalised forward = normalise(x, w, w);
      Gradients want = normalise_backward(dy, x, w);
      for (std::size_t i = 0; i < start.size(); ++i) want.dx[i] += start[i];
      std::vector<Values> results;
      for (int threads = 1; threads <= 3; ++threads) {
        const auto device = make(threads);
        const Tensor dx = put(*device, DType::float32, {n, C}, start), dw = garbage(*device, DType::float32, {C}),
                     db = garbage(*device, DType::float32, {C}), mean = put(*device, DType::float32, {n}, forward.mean),
                     rstd = put(*device, DType::float32, {n}, forward.rstd),
                     weight = put(*device, DType::float32, {C}, w), in = put(*device, DType::float32, {n, C}, x),
                     dout = put(*device, dtype(), {n, C}, dy);
        device->layernorm_backward(dx, dw, db, dout, in, mean, rstd, weight, Write::overwrite);
        EXPECT_LT(relative_error(get(*device, dx), want.dx), 1e-5) << C << " " << T;
        EXPECT_LT(relative_error(get(*device, dw), want.dw), 1e-5) << C << " " << T;
        EXPECT_LT(relative_error(get(*device, db), want.db), 1e-5) << C << " " << T;
        results.push_back(get(*device, dx));
        for (const Tensor& t : {dw, db}) {
          const Values more = get(*device, t);
          results.back().insert(results.back().end(), more.begin(), more.end());
        }
        device->layernorm_backward(dx, dw, db, dout, in, mean, rstd, weight, Write::accumulate);
        Values twice = want.dw;
        for (double& v : twice) v *= 2;
        EXPECT_LT(relative_error(get(*device, dw), twice), 1e-5);
      }
      EXPECT_EQ(results[1], results[0]);
      EXPECT_EQ(results[2], results[0]);
    }
  }
}

struct Stream {
  std::int64_t T, C;
  Values x, y, bias;
  Dropout dropout;

  Stream(Device& device, DType dtype, std::int64_t T, std::int64_t C, float p)
      : T(T), C(C), x(randoms(B * T * C, 1)), y(randoms(B * T * C, 2, dtype)), bias(randoms(C, 3)) {
    Indices order(static_cast<std::size_t>(B * T));
    for (std::size_t i = 0; i < order.size(); ++i)
      order[i] = static_cast<std::int32_t>(100 + i % static_cast<std::size_t>(T));
    dropout = {p, 7, 3, 2, Site::mlp_output, 10, 0, put(device, {B, T}, order)};
  }
  double factor(std::size_t i) const {  // of element i of the branch
    if (dropout.p == 0) return 1;
    const auto e = static_cast<std::int64_t>(i), token = e / C;
    return kept(dropout, 10 + token / T, 100 + token % T, e % C) ? 1 / (1.0 - dropout.p) : 0;
  }
  Values sum() const {
    Values out = x;
    for (std::size_t i = 0; i < out.size(); ++i) out[i] += factor(i) * (y[i] + bias[i % static_cast<std::size_t>(C)]);
    return out;
  }
};

TEST_P(LayerNorm, ResidualAddsTheDroppedBranch) {
  for (const float p : {0.0f, 0.25f}) {
    for (const std::int64_t C : widths) {
      for (int threads = 1; threads <= 3; ++threads) {
        const auto device = make(threads);
        const Stream s(*device, dtype(), 13, C, p);
        const Tensor x = put(*device, DType::float32, {B, 13, C}, s.x), y = put(*device, dtype(), {B, 13, C}, s.y),
                     bias = put(*device, DType::float32, {C}, s.bias),
                     out = garbage(*device, DType::float32, {B, 13, C});
        device->residual(out, x, y, bias, s.dropout);
        EXPECT_LT(relative_error(get(*device, out), s.sum()), 1e-6) << C << " " << p;
        device->residual(x, x, y, bias, s.dropout);
        EXPECT_EQ(get(*device, x), get(*device, out));
      }
    }
  }
}

TEST_P(LayerNorm, ResidualLayerNormIsTheTwoOneAfterTheOther) {
  for (const float p : {0.0f, 0.25f}) {
    for (const std::int64_t C : widths) {
      for (const std::int64_t T : lengths) {
        const auto device = make(3);
        const Stream s(*device, dtype(), T, C, p);
        const auto block = [&](DType type) { return garbage(*device, type, {B, T, C}); };
        const auto row = [&] { return garbage(*device, DType::float32, {B, T}); };
        const Tensor x = put(*device, DType::float32, {B, T, C}, s.x), y = put(*device, dtype(), {B, T, C}, s.y),
                     bias = put(*device, DType::float32, {C}, s.bias),
                     w = put(*device, DType::float32, {C}, randoms(C, 4)),
                     b = put(*device, DType::float32, {C}, randoms(C, 5)), out = block(DType::float32),
                     norm = block(dtype()), out2 = block(DType::float32), norm2 = block(dtype()), mean = row(),
                     rstd = row(), mean2 = row(), rstd2 = row();
        device->residual(out, x, y, bias, s.dropout);
        device->layernorm(norm, mean, rstd, out, w, b, eps);
        device->residual_layernorm(out2, norm2, mean2, rstd2, x, y, bias, w, b, eps, s.dropout);
        EXPECT_EQ(get(*device, out2), get(*device, out));
        EXPECT_EQ(get(*device, norm2), get(*device, norm));
        EXPECT_EQ(get(*device, mean2), get(*device, mean));
        EXPECT_EQ(get(*device, rstd2), get(*device, rstd));
        const Normalised want = normalise(get(*device, out), get(*device, w), get(*device, b));
        EXPECT_LT(relative_error(get(*device, norm2), want.y), tolerance());
        device->residual_layernorm(x, norm2, mean2, rstd2, x, y, bias, w, b, eps, s.dropout);  // in place
        EXPECT_EQ(get(*device, x), get(*device, out));
        EXPECT_EQ(get(*device, norm2), get(*device, norm));
      }
    }
  }
}

// The branch's gradient is the mask times dout: d/dy of sum() above, which is linear in y and in the bias.
TEST_P(LayerNorm, ResidualGradientIsMaskedAndSummed) {
  for (const float p : {0.0f, 0.25f}) {
    for (const std::int64_t C : widths) {
      for (const std::int64_t T : lengths) {
        std::vector<Values> results;
        for (int threads = 1; threads <= 3; ++threads) {
          const auto device = make(threads);
          const Stream s(*device, dtype(), T, C, p);
          Values dy = s.y, dbias(static_cast<std::size_t>(C), 0.0);
          for (std::size_t i = 0; i < dy.size(); ++i) {
            dy[i] *= s.factor(i);
            dbias[i % static_cast<std::size_t>(C)] += dy[i];
          }
          const Tensor dout = put(*device, DType::float32, {B, T, C}, s.y), d = garbage(*device, dtype(), {B, T, C}),
                       sum = garbage(*device, DType::float32, {C});
          device->residual_backward(d, sum, dout, s.dropout, Write::overwrite);
          EXPECT_LT(relative_error(get(*device, d), dy), tolerance());
          EXPECT_LT(relative_error(get(*device, sum), dbias), 1e-5);
          results.push_back(get(*device, sum));
          device->residual_backward(d, sum, dout, s.dropout, Write::accumulate);
          for (double& v : dbias) v *= 2;
          EXPECT_LT(relative_error(get(*device, sum), dbias), 1e-5);
        }
        EXPECT_EQ(results[1], results[0]);
        EXPECT_EQ(results[2], results[0]);
      }
    }
  }
}

TEST_P(LayerNorm, RefusesWhatDoesNotFit) {
  const auto device = make();
  const auto tensor = [&](DType type, Shape shape) { return device->allocate(Kind::workspace, type, shape); };
  const Tensor x = tensor(DType::float32, {4, 8}), y = tensor(dtype(), {4, 8}), w = tensor(DType::float32, {8}),
               stat = tensor(DType::float32, {4}), dw = tensor(DType::float32, {8});
  const Tensor bth = x.view({2, 2, 8}), y_bth = y.view({2, 2, 8});
  EXPECT_EQ(sentence([&] { device->layernorm(y, stat, stat, x, w.slice(0, 0, 6), w, eps); }),
            "layernorm: w is float32 [6], expected contiguous float32 [8]");
  EXPECT_NE(sentence([&] { device->layernorm(y, stat.slice(0, 0, 3), stat, x, w, w, eps); }), "");
  EXPECT_NE(sentence([&] { device->layernorm(y.slice(0, 0, 2), stat, stat, x, w, w, eps); }), "");
  EXPECT_NE(sentence([&] { device->layernorm(y, stat, stat, tensor(DType::bfloat16, {4, 8}), w, w, eps); }), "");
  EXPECT_NE(sentence([&] { device->layernorm_backward(x, dw, stat, y, x, stat, stat, w, Write::overwrite); }), "");
  EXPECT_NE(sentence([&] { device->residual(x, x, y, dw.slice(0, 0, 4), {}); }), "");
  EXPECT_NE(sentence([&] { device->residual_backward(y, stat, x, {}, Write::overwrite); }), "");
  const Dropout dropout{0.5f, 0, 0, 0, Site::embedding, 0, 0, tensor(DType::int32, {2, 2})};
  EXPECT_NE(sentence([&] { device->residual(x, x, y, w, dropout); }), "");  // not [B, T, C]
  EXPECT_EQ(sentence([&] { device->residual(bth, bth, y_bth, w, dropout); }), "");
  EXPECT_NE(sentence([&] {
              device->residual_layernorm(bth, y_bth, stat, stat, bth, y_bth, w, w, dw.slice(0, 0, 2), eps, {});
            }),
            "");
}

}  // namespace
}  // namespace onescale::contract

// Softmax cross-entropy over a whole vocabulary and over shards of one, against float64.
#include <algorithm>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class CrossEntropy : public Contract {};
CONTRACT_SUITE(CrossEntropy);

struct Reference {
  Values stats, loss, gradient;
};

// Over the first `rows` of V columns; the others are padding.
Reference reference(const Values& logits, const Indices& labels, std::int64_t V, std::int64_t rows, double weight) {
  Reference out{{}, {}, Values(logits.size(), 0.0)};
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const double* x = logits.data() + static_cast<std::ptrdiff_t>(i) * V;
    const double most = *std::max_element(x, x + rows);
    double sum = 0;
    for (std::int64_t v = 0; v < rows; ++v) sum += std::exp(x[v] - most);
    out.stats.insert(out.stats.end(), {most, sum, x[labels[i]]});
    out.loss.push_back(std::log(sum) + most - x[labels[i]]);
    for (std::int64_t v = 0; v < rows; ++v) {
      out.gradient[i * static_cast<std::size_t>(V) + static_cast<std::size_t>(v)] =
          (std::exp(x[v] - most) / sum - (v == labels[i] ? 1 : 0)) * weight;
    }
  }
  return out;
}

TEST(CrossEntropyReference, GradientIsTheNumericOne) {
  const Values logits = randoms(3 * 11, 1);
  const Indices labels = {0, 9, 4};
  const auto loss = [&](const Values& x) {
    const Values losses = reference(x, labels, 11, 10, 0.25).loss;
    return 0.25 * (losses[0] + losses[1] + losses[2]);
  };
  EXPECT_LT(relative_error(reference(logits, labels, 11, 10, 0.25).gradient, numeric_gradient(loss, logits)), 1e-8);
}

// Vocabularies around a vector and around the blocks in which the maximum is found; padding that would win every
// maximum.
TEST_P(CrossEntropy, LossAndGradient) {
  for (const std::int64_t V : {1, 37, 99, 1024, 1030, 5000}) {
    for (const std::int64_t padding : {0, 5}) {
      for (const std::int64_t n : {1, 7}) {
        const std::int64_t rows = std::max<std::int64_t>(1, V - padding);
        Values x = randoms(n * V, 1, dtype(), 4);
        for (std::int64_t i = 0; i < n; ++i) {
          for (std::int64_t v = rows; v < V; ++v) x[static_cast<std::size_t>(i * V + v)] = 96;
        }
        const Indices labels = random_indices(n, 0, static_cast<std::int32_t>(rows - 1), 2);
        const Reference want = reference(x, labels, V, rows, 0.25);
        std::vector<Values> results;
        for (int threads = 1; threads <= 3; ++threads) {
          const auto device = make(threads);
          const Tensor logits = put(*device, dtype(), {n, V}, x), stats = garbage(*device, DType::float32, {n, 3}),
                       loss = garbage(*device, DType::float32, {n}), label = put(*device, {n}, labels);
          device->softmax_statistics(stats, logits, label, 0, rows);
          EXPECT_LT(relative_error(get(*device, stats), want.stats), 1e-6) << V << " " << n;
          device->cross_entropy(loss, logits, stats, label, 0, rows, 0);
          EXPECT_EQ(get(*device, logits), x);  // no gradient asked for
          device->cross_entropy(loss, logits, stats, label, 0, rows, 0.25f);
          const Values got = get(*device, loss), gradient = get(*device, logits);
          for (std::size_t i = 0; i < got.size(); ++i)
            EXPECT_NEAR(got[i], want.loss[i], 1e-6 * (1 + std::abs(want.loss[i])));
          EXPECT_LT(relative_error(gradient, want.gradient), tolerance()) << V << " " << n;
          for (std::int64_t v = rows; v < V; ++v) ASSERT_EQ(gradient[static_cast<std::size_t>(v)], 0);
          results.push_back(gradient);
          results.back().insert(results.back().end(), got.begin(), got.end());
        }
        EXPECT_EQ(results[1], results[0]);
        EXPECT_EQ(results[2], results[0]);
      }
    }
  }
}

// Two shards of 60 and 39 of 99 rows, the second padded to 60, their statistics combined as tensor parallelism does.
TEST_P(CrossEntropy, ShardsOfTheVocabularyAgreeWithTheWhole) {
  const std::int64_t V = 99, n = 13, shard = 60;
  const Values x = randoms(n * V, 3, dtype(), 3);
  const Indices labels = random_indices(n, 0, 98, 4);
  const Reference want = reference(x, labels, V, V, 0.5);
  const auto device = make();
  const Tensor label = put(*device, {n}, labels);
  Tensor logits[2];
  std::vector<Values> stats;
  for (std::int64_t r = 0; r < 2; ++r) {
    Values part;
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t v = r * shard; v < (r + 1) * shard; ++v)
        part.push_back(v < V ? x[static_cast<std::size_t>(i * V + v)] : 50);
    }
    logits[r] = put(*device, dtype(), {n, shard}, part);
    const Tensor s = garbage(*device, DType::float32, {n, 3});
    device->softmax_statistics(s, logits[r], label, r * shard, std::min(shard, V - r * shard));
    stats.push_back(get(*device, s));
  }
  Values whole;
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const double *a = stats[0].data() + i * 3, *b = stats[1].data() + i * 3, most = std::max(a[0], b[0]);
    whole.insert(whole.end(), {most, a[1] * std::exp(a[0] - most) + b[1] * std::exp(b[0] - most), a[2] + b[2]});
  }
  EXPECT_LT(relative_error(whole, want.stats), 1e-6);
  const Tensor all = put(*device, DType::float32, {n, 3}, whole), loss = garbage(*device, DType::float32, {n});
  Values gradient(x.size());
  for (std::int64_t r = 0; r < 2; ++r) {
    device->cross_entropy(loss, logits[r], all, label, r * shard, std::min(shard, V - r * shard), 0.5f);
    EXPECT_LT(relative_error(get(*device, loss), want.loss), 1e-6);
    const Values part = get(*device, logits[r]);
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t v = 0; v < shard; ++v) {
        const double d = part[static_cast<std::size_t>(i * shard + v)];
        if (r * shard + v < V)
          gradient[static_cast<std::size_t>(i * V + r * shard + v)] = d;
        else
          ASSERT_EQ(d, 0);
      }
    }
  }
  EXPECT_LT(relative_error(gradient, want.gradient), tolerance());
}

// Three shards, of which one is nothing but padding: the maximum is the largest, sums are brought to it, labels add up.
TEST_P(CrossEntropy, StatisticsOfShardsCombine) {
  const auto device = make();
  const Tensor parts = put(*device, DType::float32, {3, 2, 3},
                           {2, 1.5, 0.25, 0, 1, 7,  //
                            -INFINITY, 0, 0, -INFINITY, 0, 0, 1, 3, 0, 5, 2, 0}),
               stats = garbage(*device, DType::float32, {2, 3});
  device->combine_statistics(stats, parts);
  const Values got = get(*device, stats), want = {2, 1.5 + 3 * std::exp(-1), 0.25, 5, std::exp(-5) + 2, 7};
  EXPECT_LT(relative_error(got, want), 1e-7);
  // What is not a number in one shard is not lost among the others.
  const Tensor bad = put(*device, DType::float32, {2, 1, 3}, {1, 2, 3, 1, NAN, 0});
  device->combine_statistics(stats.slice(0, 0, 1), bad);
  EXPECT_TRUE(std::isnan(get(*device, stats)[1]));
  EXPECT_EQ(sentence([&] { device->combine_statistics(stats, bad); }),
            "combine_statistics: parts is float32 [2, 1, 3], expected contiguous float32 [2, 2, 3]");
}

TEST_P(CrossEntropy, AShardOfNothingButPaddingAddsNothing) {
  const auto device = make();
  const Tensor logits = put(*device, dtype(), {1, 4}, {1, 2, 3, 4}), stats = garbage(*device, DType::float32, {1, 3}),
               label = put(*device, {1}, Indices{2});
  device->softmax_statistics(stats, logits, label, 100, 0);
  EXPECT_EQ(get(*device, stats), (Values{-INFINITY, 0, 0}));
}

// Large and tiny logits neither overflow nor vanish; a NaN is not hidden.
TEST_P(CrossEntropy, ExtremeLogits) {
  const auto device = make();
  const std::int64_t V = 3000;
  Values x(static_cast<std::size_t>(3 * V), -INFINITY);
  for (std::int64_t v = 0; v < V; ++v) {
    x[static_cast<std::size_t>(v)] = v < 1500 ? -1e4 : 1e4;  // rises late
    if (v >= 2000) x[static_cast<std::size_t>(V + v)] = 5;   // whole blocks of -inf first
    x[static_cast<std::size_t>(2 * V + v)] = v == 7 ? NAN : 0;
  }
  x = rounded(x, dtype());
  const Tensor logits = put(*device, dtype(), {3, V}, x), stats = garbage(*device, DType::float32, {3, 3}),
               label = put(*device, {3}, Indices{2500, 2500, 1}), loss = garbage(*device, DType::float32, {3});
  device->softmax_statistics(stats, logits, label, 0, V);
  device->cross_entropy(loss, logits, stats, label, 0, V, 1);
  const Values got = get(*device, loss);
  EXPECT_NEAR(got[0], std::log(1500.0), 1e-3);  // 1e4 + 7.3 in float32
  EXPECT_NEAR(got[1], std::log(1000.0), 1e-5);
  EXPECT_TRUE(std::isnan(got[2]));
}

TEST_P(CrossEntropy, RefusesWhatDoesNotFit) {
  const auto device = make();
  const Tensor logits = device->allocate(Kind::workspace, dtype(), {4, 8}),
               stats = device->allocate(Kind::workspace, DType::float32, {4, 3}),
               labels = device->allocate(Kind::workspace, DType::int32, {4}),
               loss = device->allocate(Kind::workspace, DType::float32, {4});
  EXPECT_EQ(sentence([&] { device->softmax_statistics(stats.slice(0, 0, 3), logits, labels, 0, 8); }),
            "softmax_statistics: stats is float32 [3, 3], expected contiguous float32 [4, 3]");
  EXPECT_EQ(sentence([&] { device->softmax_statistics(stats, logits, labels, 0, 9); }),
            str("softmax_statistics: rows = 9 of logits ", logits.describe()));
  EXPECT_NE(sentence([&] { device->cross_entropy(labels, logits, stats, labels, 0, 8, 1); }), "");
  EXPECT_NE(sentence([&] { device->cross_entropy(loss, logits, stats, loss, 0, 8, 1); }), "");
}

}  // namespace
}  // namespace onescale::contract

// What is drawn, beside the closed form of what should be: logits that do not depend on the text, so that a token's
// share of many draws is its probability.
#include "train/sample.h"

#include <gtest/gtest.h>

#include <cmath>

#include "train/verify.h"

namespace onescale {
namespace {

constexpr std::int64_t draws = 400;

// The logits of ids 0 to 3 are -4, -1, -2 and -6, those of all others are known_losses()'s.
struct Drawn {
  explicit Drawn(const Options& options, std::int32_t end_of_text = -1) {
    VerifyCase c = known_losses(small_case({}, 1), 1);

    c.config.n_positions = draws + 1;
    const auto mesh = Mesh::single();
    const auto device = make_cpu_device(1, false);
    ModelWeights weights(*device, *mesh, c.config);
    weights.load(c.weights);
    GptBigCode model(*device, *mesh, c.config, SpMode::ulysses, 1, 64, DType::float32, Recompute::none, false);
    Decoder decoder(model, draws + 1);
    ids = *generate(decoder, weights.units(), std::vector<std::int32_t>{5}, end_of_text, options, draws);
    share.resize(static_cast<std::size_t>(c.config.vocab_size));
    for (const std::int32_t id : ids) share[static_cast<std::size_t>(id)] += 1.0 / static_cast<double>(ids.size());
  }
  std::vector<std::int32_t> ids;
  std::vector<double> share;
};

Options sampling(double temperature, std::int64_t top_k = 0, double top_p = 1) {
  Options o;
  o.temperature = temperature;
  o.top_k = top_k;
  o.top_p = top_p;
  return o;
}

// Five standard deviations of a share.
void expect_share(double share, double probability) {
  EXPECT_NEAR(share, probability, 1e-9 + 5 * std::sqrt(probability * (1 - probability) / draws)) << probability;
}

const double others = (1 - std::exp(-4) - std::exp(-1) - std::exp(-2) - std::exp(-6)) / 93;  // of each other id

TEST(Sample, SharesAreTheProbabilities) {
  const Drawn drawn(sampling(1));
  expect_share(drawn.share[0], std::exp(-4));
  expect_share(drawn.share[1], std::exp(-1));
  expect_share(drawn.share[2], std::exp(-2));
  expect_share(drawn.share[3], std::exp(-6));
  double rest = 0;
  for (std::size_t i = 4; i < 97; ++i) rest += drawn.share[i], expect_share(drawn.share[i], others);
  expect_share(rest, 93 * others);
}

TEST(Sample, TemperatureDividesTheLogits) {
  const Drawn cold(sampling(0.5)), hot(sampling(2));
  const double of_cold = std::exp(-2) + std::exp(-4) + std::exp(-8) + std::exp(-12) + 93 * others * others;
  expect_share(cold.share[1], std::exp(-2) / of_cold);
  expect_share(cold.share[2], std::exp(-4) / of_cold);
  const double of_hot = std::exp(-0.5) + std::exp(-1) + std::exp(-2) + std::exp(-3) + 93 * std::sqrt(others);
  expect_share(hot.share[1], std::exp(-0.5) / of_hot);
  for (const std::int32_t id : Drawn(sampling(0)).ids) ASSERT_EQ(id, 1);
}

TEST(Sample, TopKAndTopPKeepTheLikeliest) {
  const double two = std::exp(-1) + std::exp(-2), three = two + std::exp(-4);
  const Drawn k(sampling(1, 2));
  expect_share(k.share[1], std::exp(-1) / two);
  EXPECT_NEAR(k.share[1] + k.share[2], 1, 1e-9);
  // 0.37 and 0.50 are reached by one and two tokens, 0.52 by three.
  for (const auto& [top_p, kept, whole] :
       {std::tuple{0.36, 1, std::exp(-1)}, {0.38, 2, two}, {0.50, 2, two}, {0.51, 3, three}}) {
    const Drawn p(sampling(1, 0, top_p));
    expect_share(p.share[1], std::exp(-1) / whole);
    EXPECT_NEAR(p.share[1] + (kept > 1 ? p.share[2] : 0) + (kept > 2 ? p.share[0] : 0), 1, 1e-9) << top_p;
  }
  // After top_k the share is one of what it kept.
  expect_share(Drawn(sampling(1, 2, 0.7)).share[1], 1);
  expect_share(Drawn(sampling(1, 2, 0.74)).share[1], std::exp(-1) / two);
}

TEST(Sample, EndsWithTheText) {
  EXPECT_EQ(Drawn(sampling(0), 1).ids.size(), 0u);  // the likeliest
  EXPECT_EQ(Drawn(sampling(0), 2).ids.size(), static_cast<std::size_t>(draws));
}

TEST(Sample, DependsOnTheSeed) {
  Options other = sampling(1);
  other.seed = 2;
  EXPECT_NE(Drawn(sampling(1)).ids, Drawn(other).ids);
}

}  // namespace
}  // namespace onescale

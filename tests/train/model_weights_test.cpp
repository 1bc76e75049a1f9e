#include "train/model_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace onescale {
namespace {

std::map<std::string, std::vector<float>> initial(const ModelConfig& config, std::uint64_t seed) {
  const auto mesh = Mesh::single();
  const auto device = make_cpu_device(1, false);
  ModelWeights weights(*device, *mesh, config);
  weights.initialise(seed);
  std::map<std::string, std::vector<float>> all;
  for (std::size_t i = 0; i < weights.table().parameters.size(); ++i) {
    const Parameter& p = weights.table().parameters[i];
    std::vector<float>& values = all[p.name];
    values.resize(static_cast<std::size_t>(p.numel()));
    weights.assembly().gather({static_cast<std::int64_t>(i)}, weights.source(), values.data());
  }
  return all;
}

// What transformers draws: N(0, r), of the two c_proj N(0, r / sqrt(2 n_layer)), biases 0, LayerNorm's weights 1.
TEST(ModelWeights, BeginAsTransformersDoes) {
  ModelConfig config{.vocab_size = 90, .n_positions = 40, .n_embd = 48, .n_layer = 3, .n_head = 4, .n_inner = 192};
  config.tie_word_embeddings = false;
  config.initializer_range = 0.05f;
  const auto first = initial(config, 1), second = initial(config, 2);
  std::set<float> beginnings;
  for (const auto& [name, values] : first) {
    const bool bias = name.ends_with("bias"), norm = name.find("ln_") != std::string::npos;
    if (bias || norm) {
      for (const float x : values) ASSERT_EQ(x, bias ? 0 : 1) << name;
      continue;
    }
    const double wanted = name.find("c_proj") != std::string::npos ? 0.05 / std::sqrt(6.0) : 0.05,
                 n = static_cast<double>(values.size());
    double sum = 0, square = 0;
    for (const float x : values) sum += x, square += x * x;
    EXPECT_NEAR(sum / n, 0, 5 * wanted / std::sqrt(n)) << name;  // five standard deviations of a mean and of a variance
    EXPECT_NEAR(square / n / (wanted * wanted), 1, 5 * std::sqrt(2 / n)) << name;
    EXPECT_TRUE(beginnings.insert(values[0] / static_cast<float>(wanted)).second)
        << name << " begins as another tensor";
    EXPECT_NE(values, second.at(name)) << name;
  }
  EXPECT_EQ(beginnings.size(), 3u + 3 * 4);
}

}  // namespace
}  // namespace onescale

#include "train/plain_forward.h"

#include "tests/train/golden.h"

namespace onescale {
namespace {

PlainWeights weights_of(const Golden& golden) {
  PlainWeights weights;
  const ParameterTable& table = golden.source.table();
  for (std::size_t i = 0; i < table.parameters.size(); ++i) {
    std::vector<float> values(static_cast<std::size_t>(table.parameters[i].numel()));
    golden.source.read(i, 0, table.parameters[i].numel(), values.data());
    weights[table.parameters[i].name].assign(values.begin(), values.end());
  }
  return weights;
}

TEST(PlainForwardGolden, IsTheLossOfTransformers) {
  for (const char* name : {"mqa", "mha", "erf_noscale", "wide_mqa", "wide_mha"}) {
    const Golden golden(name);
    const HostBatch batch = read_batch(golden.dir + "/batch.safetensors", golden.source.config());
    const double loss = plain_loss(golden.source.config(), weights_of(golden), batch.seq_len, batch.ids, batch.labels);
    // Both are of float64; the epsilon of a layer norm is a float here.
    EXPECT_NEAR(loss / golden.values("loss")[0], 1, 1e-10) << name;
  }
}

// One weight 1 and the gradients 3 and -1: what Adam's two moments are by hand, the first step being g / |g|.
TEST(PlainOptimizer, IsTheClosedForm) {
  const double m = 0.9 * 0.3 - 0.1, v = 0.99 * 0.09 + 0.01;  // beta1 0.9, beta2 0.99
  const double first = 1 - 0.5 * (3 / (3 + 0.25)), second = first - 0.5 * (m / 0.19 / (std::sqrt(v / 0.0199) + 0.25));
  PlainOptimizer adamw{true, 0.5, 0.9, 0.99, 0.25, 0}, sgd{false, 0.5, 0, 0, 0, 0.1};
  PlainWeights w = {{"b.bias", {1}}};
  adamw.update(w, {{"b.bias", {3}}});
  EXPECT_DOUBLE_EQ(w.at("b.bias")[0], first);
  adamw.update(w, {{"b.bias", {-1}}});
  EXPECT_DOUBLE_EQ(w.at("b.bias")[0], second);
  w = {{"b.bias", {1}}, {"c.weight", {1}}, {"h.ln_1.weight", {1}}};
  sgd.update(w, {{"b.bias", {3}}, {"c.weight", {3}}, {"h.ln_1.weight", {3}}});
  EXPECT_DOUBLE_EQ(w.at("b.bias")[0], 1 - 0.5 * 3);
  EXPECT_DOUBLE_EQ(w.at("h.ln_1.weight")[0], 1 - 0.5 * 3);
  EXPECT_DOUBLE_EQ(w.at("c.weight")[0], 1 - 0.5 * (3 + 0.1));
}

}  // namespace
}  // namespace onescale

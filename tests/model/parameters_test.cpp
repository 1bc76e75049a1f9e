#include "model/parameters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace onescale {
namespace {

ModelConfig family(std::int64_t L, std::int64_t H, std::int64_t h, std::int64_t P, std::int64_t V) {
  return {.vocab_size = V, .n_positions = P, .n_embd = H, .n_layer = L, .n_head = h, .n_inner = 4 * H};
}

// The published family, reference/gptbigcode.md 2.1.
TEST(Parameters, CountsOfThePublishedModels) {
  const std::vector<std::pair<ModelConfig, std::int64_t>> models = {
      {family(20, 768, 12, 8192, 49152), 164144128},    {family(24, 2048, 16, 2048, 49280), 1124886528},
      {family(24, 2048, 16, 8192, 49152), 1137207296},  {family(36, 2816, 22, 8192, 49152), 3043311104},
      {family(42, 4096, 32, 8192, 49152), 7327263232},  {family(40, 6144, 48, 8192, 49152), 15517456384},
      {family(52, 6144, 48, 8192, 49152), 20066993152}, {family(88, 6144, 48, 8192, 49152), 33715603456}};
  for (const auto& [config, count] : models) {
    EXPECT_EQ(gpt_bigcode_table(config).numel(), count);
    EXPECT_EQ(config.parameters(), count);
  }
}

const Parameter& named(const ParameterTable& table, const std::string& name) {
  for (const Parameter& p : table.parameters) {
    if (p.name == name) return p;
  }
  ADD_FAILURE() << "no " << name;
  return table.parameters.front();
}

TEST(Parameters, TheTableOfASmallModel) {
  ModelConfig config{.vocab_size = 99, .n_positions = 64, .n_embd = 48, .n_layer = 3, .n_head = 4, .n_inner = 37};
  const ParameterTable tied = gpt_bigcode_table(config);
  EXPECT_EQ(tied.parameters.size(), 4u + 12 * 3);
  EXPECT_EQ(tied.units, 5);
  const std::vector<std::string> names = {"transformer.wte.weight", "transformer.wpe.weight",
                                          "transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias",
                                          "transformer.h.0.attn.c_attn.weight"};
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(tied.parameters[i].name, names[i]);
  EXPECT_EQ(tied.parameters.back().name, "transformer.ln_f.bias");
  for (std::size_t i = 1; i < tied.parameters.size(); ++i) {
    EXPECT_LE(tied.parameters[i - 1].unit, tied.parameters[i].unit);
    EXPECT_EQ(tied.parameters[i].decay, tied.parameters[i].shape.size() == 2);
  }
  EXPECT_EQ(tied.parameters[1].unit, 0);
  EXPECT_EQ(tied.parameters[2].unit, 1);
  EXPECT_EQ(tied.parameters.back().unit, 4);

  const Parameter& c_attn = named(tied, "transformer.h.2.attn.c_attn.weight");
  EXPECT_EQ(c_attn.shape, (std::vector<std::int64_t>{48 + 2 * 12, 48}));
  EXPECT_EQ(c_attn.tp_rule, TpRule::fused_qkv);
  EXPECT_EQ(c_attn.partial_rows, 24);
  EXPECT_EQ(c_attn.init_stddev, 0.02f);
  EXPECT_EQ(named(tied, "transformer.h.2.attn.c_attn.bias").partial_rows, 24);
  EXPECT_EQ(named(tied, "transformer.h.1.mlp.c_proj.weight").shape, (std::vector<std::int64_t>{48, 37}));
  for (const char* name : {"transformer.h.1.mlp.c_proj.weight", "transformer.h.1.attn.c_proj.weight"}) {
    EXPECT_EQ(named(tied, name).tp_rule, TpRule::columns);
    EXPECT_FLOAT_EQ(named(tied, name).init_stddev, static_cast<float>(0.02 / std::sqrt(6.0)));
  }
  EXPECT_EQ(named(tied, "transformer.h.1.mlp.c_proj.bias").tp_rule, TpRule::replicated);
  EXPECT_EQ(named(tied, "transformer.h.1.mlp.c_fc.bias").tp_rule, TpRule::rows);
  EXPECT_EQ(named(tied, "transformer.wte.weight").tp_rule, TpRule::rows);
  EXPECT_EQ(named(tied, "transformer.wpe.weight").tp_rule, TpRule::replicated);
  EXPECT_EQ(named(tied, "transformer.h.0.ln_2.weight").init_mean, 1);
  EXPECT_EQ(named(tied, "transformer.h.0.ln_2.bias").init_mean, 0);

  config.tie_word_embeddings = false;
  config.multi_query = false;
  const ParameterTable untied = gpt_bigcode_table(config);
  EXPECT_EQ(untied.units, 6);
  EXPECT_EQ(untied.parameters.back().name, "lm_head.weight");
  EXPECT_EQ(untied.parameters.back().unit, 5);
  EXPECT_EQ(untied.numel(), config.parameters());
  EXPECT_EQ(named(untied, "transformer.h.0.attn.c_attn.weight").shape, (std::vector<std::int64_t>{144, 48}));
  EXPECT_EQ(named(untied, "transformer.h.0.attn.c_attn.weight").partial_rows, 0);
}

}  // namespace
}  // namespace onescale

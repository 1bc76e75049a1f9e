#include "model/parameters.h"

#include <cmath>
#include <utility>

#include "kernels/error.h"

namespace onescale {

ParameterTable gpt_bigcode_table(const ModelConfig& config) {
  ParameterTable table;
  const std::int64_t H = config.n_embd, I = config.n_inner, Q = config.qkv_size();
  const float r = config.initializer_range;
  const auto residual =
      static_cast<float>(static_cast<double>(r) / std::sqrt(2.0 * static_cast<double>(config.n_layer)));
  // With one K/V head every rank keeps its rows and sees its own query heads; with many, heads are cut whole.
  const std::int64_t kv_rows = config.multi_query ? 2 * config.head_size() : 0;

  auto matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns, TpRule rule, float stddev,
                    std::int64_t partial_rows = 0) {
    table.parameters.push_back({name + ".weight", {rows, columns}, table.units, rule, partial_rows, 0, stddev, true});
  };
  auto vector = [&](const std::string& name, std::int64_t size, TpRule rule, float value,
                    std::int64_t partial_rows = 0) {
    table.parameters.push_back({name, {size}, table.units, rule, partial_rows, value, 0, false, true});
  };
  auto layernorm = [&](const std::string& name) {
    vector(name + ".weight", H, TpRule::replicated, 1);
    vector(name + ".bias", H, TpRule::replicated, 0);
  };

  matrix("transformer.wte", config.vocab_size, H, TpRule::rows, r);
  matrix("transformer.wpe", config.n_positions, H, TpRule::replicated, r);
  table.parameters.back().float32 = true;
  ++table.units;
  for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
    const std::string block = str("transformer.h.", layer, ".");
    layernorm(block + "ln_1");
    matrix(block + "attn.c_attn", Q, H, TpRule::fused_qkv, r, kv_rows);
    vector(block + "attn.c_attn.bias", Q, TpRule::fused_qkv, 0, kv_rows);
    matrix(block + "attn.c_proj", H, H, TpRule::columns, residual);
    vector(block + "attn.c_proj.bias", H, TpRule::replicated, 0);
    layernorm(block + "ln_2");
    matrix(block + "mlp.c_fc", I, H, TpRule::rows, r);
    vector(block + "mlp.c_fc.bias", I, TpRule::rows, 0);
    matrix(block + "mlp.c_proj", H, I, TpRule::columns, residual);
    vector(block + "mlp.c_proj.bias", H, TpRule::replicated, 0);
    ++table.units;
  }
  layernorm("transformer.ln_f");
  ++table.units;
  if (!config.tie_word_embeddings) {
    matrix("lm_head", config.vocab_size, H, TpRule::rows, r);
    ++table.units;
  }
  return table;
}

std::int64_t ModelConfig::parameters() const {
  return gpt_bigcode_table(*this).numel();
}

}  // namespace onescale

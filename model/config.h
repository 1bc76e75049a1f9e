// The model's configuration, read from and written to a Hugging Face config.json (model_type gpt_bigcode).
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device.h"

namespace onescale {

struct ModelConfig {
  std::int64_t vocab_size = 50257, n_positions = 1024, n_embd = 768, n_layer = 12, n_head = 12;
  std::int64_t n_inner = 0;  // never 0 once read: null in the file means 4 * n_embd
  bool multi_query = true;
  Gelu gelu = Gelu::tanh;
  bool scale_attn_weights = true;  // scores are divided by sqrt(head size)
  float layer_norm_epsilon = 1e-5f, initializer_range = 0.02f;
  float embd_pdrop = 0.1f, resid_pdrop = 0.1f, attn_pdrop = 0.1f;
  bool tie_word_embeddings = true;
  std::int64_t bos_token_id = 50256, eos_token_id = 50256;  // -1: none

  std::int64_t head_size() const { return n_embd / n_head; }
  std::int64_t kv_heads() const { return multi_query ? 1 : n_head; }
  std::int64_t qkv_size() const { return n_embd + 2 * kv_heads() * head_size(); }
  std::int64_t parameters() const;  // elements of gpt_bigcode_table()
};

// The sizes of what one tensor-parallel rank computes.
struct ModelShard {
  ModelShard(const ModelConfig& config, int tp, int tp_rank);

  std::int64_t heads, first_head;     // query heads, and the first of them
  std::int64_t kv_heads, width, qkv;  // width: of all query heads; qkv: columns of the fused projection
  std::int64_t inner;
  std::int64_t vocab, first_id, ids;  // rows of the table; the ids first_id .. first_id + ids - 1, then padding
  float attention_scale;              // of the scores
};

// Reads a config.json, or that of a directory. Both names of every alias are accepted, fields that change no number are
// ignored; what cannot be honoured (another model_type, cross attention, an unknown activation, heads that do not
// divide n_embd) is refused by name.
ModelConfig read_config(const std::string& path);
// The text of a config.json that transformers loads. dtype: that of the weights beside it, as "float32".
std::string config_json(const ModelConfig& config, const std::string& dtype = "float32");
// Throws UsageError where sizes do not fit together; `where` begins the sentence.
void check_config(const ModelConfig& config, const std::string& where);

}  // namespace onescale

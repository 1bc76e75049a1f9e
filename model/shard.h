// The sizes of what one tensor-parallel rank computes.
#pragma once

#include <algorithm>
#include <cmath>

#include "model/config.h"

namespace onescale {

struct ModelShard {
  ModelShard(const ModelConfig& config, int tp, int tp_rank)
      : heads(config.n_head / tp),
        first_head(heads * tp_rank),
        kv_heads(config.multi_query ? 1 : heads),
        width(heads * config.head_size()),
        qkv(width + 2 * kv_heads * config.head_size()),
        inner(config.n_inner / tp),
        vocab((config.vocab_size + tp - 1) / tp),
        first_id(vocab * tp_rank),
        ids(std::clamp(config.vocab_size - first_id, std::int64_t{0}, vocab)),
        attention_scale(config.scale_attn_weights
                            ? static_cast<float>(1 / std::sqrt(static_cast<double>(config.head_size())))
                            : 1.0f) {}

  std::int64_t heads, first_head;     // query heads, and the first of them
  std::int64_t kv_heads, width, qkv;  // width: of all query heads; qkv: columns of the fused projection
  std::int64_t inner;
  std::int64_t vocab, first_id, ids;  // rows of the table; the ids first_id .. first_id + ids - 1, then padding
  float attention_scale;              // of the scores
};

}  // namespace onescale

// The table of GPTBigCode's parameters.
#pragma once

#include "model/config.h"
#include "parallel/parameter_table.h"

namespace onescale {

// Units: 0 wte, wpe; 1 .. n_layer the blocks, each ln_1, attn.c_attn, attn.c_proj, ln_2, mlp.c_fc, mlp.c_proj with
// weight and bias; n_layer + 1 ln_f; and, only when tie_word_embeddings is false, n_layer + 2 lm_head.weight. Initial
// values as in transformers: N(0, r) for matrices and embeddings, N(0, r/sqrt(2 n_layer)) for the two c_proj.weight
// that write to the residual stream, biases 0, LayerNorm weights 1.
ParameterTable gpt_bigcode_table(const ModelConfig& config);

}  // namespace onescale

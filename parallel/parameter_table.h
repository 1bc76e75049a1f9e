// The one table of parameters. Initialisation, slicing over tensor-parallel ranks, sharding, gradient reduction, the
// norm, checkpoints and export read it; nothing else asks for a tensor by name. model/ fills it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace onescale {

// How a tensor is cut over tensor-parallel ranks.
enum class TpRule : std::uint8_t { replicated, rows, columns, fused_qkv };

struct Parameter {
  std::string name;                 // as in a Hugging Face checkpoint, e.g. "transformer.h.0.attn.c_attn.weight"
  std::vector<std::int64_t> shape;  // whole and logical, [out, in] for a matrix
  int unit = 0;                     // what is gathered, released and reduced together
  TpRule tp_rule = TpRule::replicated;
  std::int64_t partial_rows = 0;  // trailing rows whose gradient is partial over tp: K and V of multi-query attention
  float init_mean = 0, init_stddev = 0;
  bool decay = false;    // weight decay acts on matrices only
  bool float32 = false;  // not rounded where the model multiplies in bfloat16

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    return n;
  }
};

struct ParameterTable {
  // Units ascending; the position is the tensor's number in the key of its initial weights.
  std::vector<Parameter> parameters;
  int units = 0;

  std::int64_t numel() const {
    std::int64_t n = 0;
    for (const Parameter& p : parameters) n += p.numel();
    return n;
  }
};

}  // namespace onescale

// What one pass over a micro-batch carries besides tensors: positions, visibility, and the key of every dropout draw.
#pragma once

#include "kernels/device.h"
#include "model/config.h"

namespace onescale {

struct Pass {
  std::int64_t rows = 0, seq_len = 0;  // B and T of this rank's share of the micro-batch
  Tensor positions;                    // int32 [B, T], global
  Tensor query_positions;              // int32, those of attention's queries: all tokens' when ranks share out heads
  Visible visible;                     // of the queries
  std::uint64_t seed = 0;
  std::int64_t step = 0, first_row = 0;
  bool dropout = false;  // false in evaluation and generation

  std::int64_t tokens() const { return rows * seq_len; }

  Dropout drop(float p, Site site, std::int64_t layer) const {
    return {dropout ? p : 0.0f, seed, step, layer, site, first_row, 0, positions};
  }
};

}  // namespace onescale

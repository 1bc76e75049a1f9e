// What one pass over a micro-batch carries besides tensors: positions, visibility, and the key of every dropout draw.
#pragma once

#include "kernels/device.h"

namespace onescale {

struct Pass {
  Tensor positions;  // int32 [B, T], global, of this rank's tokens
  Visible visible;   // of attention's queries, all tokens' when ranks share out heads; each sees up to its own position
  std::uint64_t seed = 0;
  std::int64_t step = 0, first_row = 0;
  bool train = false;  // false in evaluation and generation: no dropout, nothing kept

  // x [B * T, ...] as [B, T, ...].
  Tensor by_row(Tensor x) const { return x.split_first(positions.dim(0), positions.dim(1)); }

  Dropout drop(float p, Site site, std::int64_t layer) const {
    return {train ? p : 0.0f, seed, step, layer, site, first_row, 0, positions};
  }
};

}  // namespace onescale

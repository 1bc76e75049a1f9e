// Whole logical tensors, put together from the parts that ranks own.
#pragma once

#include <functional>

#include "parallel/zero.h"

namespace onescale {

class Assembly {
 public:
  Assembly(Mesh& mesh, const Placement& place);

  // What is assembled: of each unit, at least this rank's part of it, float32.
  using Source = std::function<Owned(int unit)>;

  // wanted[r]: the parameter that world rank r receives whole in `out`, or -1 for none. Collective over the world; a
  // rank's memory grows by one tensor.
  void gather(const std::vector<std::int64_t>& wanted, const Source& source, float* out) const;

 private:
  // What the rank at `layout` contributes to a parameter: its part, replicated elements from tp rank 0 alone.
  Stretch contribution(std::int64_t parameter, const Layout& layout) const;

  Mesh& mesh_;
  const Placement& place_;
  std::vector<TensorSlices> slices_;  // by tp rank
};

}  // namespace onescale

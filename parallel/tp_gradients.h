// What tensor parallelism asks of reduced gradients: the K/V rows' are summed over tp, and all copies of a replicated
// element hold the same bits.
#pragma once

#include "parallel/zero.h"

namespace onescale {

class TpGradients {
 public:
  // whole: the gradients given to finish() are whole units instead of this rank's part.
  TpGradients(Device& device, Mesh& mesh, const Placement& place, Reduction reduction, bool whole);

  // gradients[unit]: reduced over the shard group. The partial rows are summed over tp in rank order; after a library's
  // reduction, whose order may differ between ranks, replicated elements take the bits of tp rank 0.
  void finish(const std::vector<Owned>& gradients);

 private:
  struct Interval {
    int unit;
    std::int64_t begin, end;
  };
  Device& dev_;
  Communicator& tp_;
  std::vector<Interval> partial_, replicated_;
  Tensor sums_, staging_;
};

}  // namespace onescale

// The sum of partial activations over tensor-parallel ranks.
#pragma once

#include "parallel/reduction.h"

namespace onescale {

class TensorParallel {
 public:
  // numel, dtype: of the largest activation that is summed.
  TensorParallel(Device& device, Communicator& tp, std::int64_t numel, DType dtype) : dev_(device), tp_(tp) {
    if (tp.size() > 1) staging_ = device.allocate(Kind::transient, dtype, {ordered_staging(tp, numel)});
  }

  int size() const { return tp_.size(); }
  int rank() const { return tp_.rank(); }
  Communicator& group() const { return tp_; }
  // x = the sum over ranks, the same bits on each; with one rank nothing is done.
  void all_reduce(Tensor x) const { ordered_all_reduce(dev_, tp_, x, staging_); }

 private:
  Device& dev_;
  Communicator& tp_;
  Tensor staging_;
};

}  // namespace onescale

// The sum of what tensor-parallel ranks hold parts of: activations, and gradients of rows that all of them have.
#pragma once

#include "kernels/device.h"
#include "parallel/communicator.h"

namespace onescale {

class TensorParallel {
 public:
  // numel: of the largest tensor that is summed.
  TensorParallel(Device& device, Communicator& tp, std::int64_t numel) : dev_(device), tp_(tp) {
    if (tp.size() > 1) staging_ = device.allocate(Kind::transient, DType::float32, {tp.size() * share(numel)});
  }

  int size() const { return tp_.size(); }
  int rank() const { return tp_.rank(); }
  Communicator& group() const { return tp_; }

  // x, contiguous = the sum over ranks in rank order, added in float32 and rounded once: the same bits on each. With
  // one rank nothing is done.
  void all_reduce(Tensor x) const;

 private:
  // Elements of each rank's share of `numel`, rounded up.
  std::int64_t share(std::int64_t numel) const { return (numel + size() - 1) / size(); }

  Device& dev_;
  Communicator& tp_;
  Tensor staging_;
};

}  // namespace onescale

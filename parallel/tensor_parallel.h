// The sum of what tensor-parallel ranks hold parts of: activations, and gradients of rows that all of them have.
#pragma once

#include <algorithm>

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
  void all_reduce(Tensor x) const {
    if (size() == 1 || x.numel() == 0) return;
    const std::int64_t n = share(x.numel());
    const auto begin = [&](int r) { return std::min(r * n, x.numel()); };
    std::vector<Tensor> parts, received;
    for (int r = 0; r < size(); ++r) parts.push_back(x.view({-1}).slice(0, begin(r), begin(r + 1)));
    const Tensor mine = parts[index(rank())];
    for (int r = 0; r < size(); ++r)
      received.emplace_back(staging_.slice(0, r * n, r * n + mine.numel()).data, x.dtype,
                            std::initializer_list<std::int64_t>{mine.numel()});
    // The own part stays where it is: an empty piece travels to oneself.
    std::vector<Tensor> to = received, from = parts;
    to[index(rank())] = from[index(rank())] = mine.slice(0, 0, 0);
    tp_.all_to_all(to, from)->wait();
    received[index(rank())] = mine;
    dev_.sum_pieces(mine, received, Write::overwrite);
    tp_.all_gather(parts, mine)->wait();
  }

 private:
  // Elements of each rank's share of `numel`, rounded up.
  std::int64_t share(std::int64_t numel) const { return (numel + size() - 1) / size(); }

  Device& dev_;
  Communicator& tp_;
  Tensor staging_;
};

}  // namespace onescale

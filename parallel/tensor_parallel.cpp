#include "parallel/tensor_parallel.h"

#include <algorithm>

namespace onescale {

TensorParallel::TensorParallel(Device& device, Communicator& tp, std::int64_t numel, DType dtype)
    : dev_(device), tp_(tp) {
  if (tp.size() > 1) staging_ = device.allocate(Kind::transient, dtype, {tp.size() * share(numel)});
}

void TensorParallel::all_reduce(Tensor x) const {
  if (tp_.size() == 1 || x.numel() == 0) return;
  const std::int64_t n = share(x.numel());
  const Tensor flat = x.view({-1});
  std::vector<Tensor> parts, received;
  for (int r = 0; r < tp_.size(); ++r)
    parts.push_back(flat.slice(0, std::min(r * n, x.numel()), std::min((r + 1) * n, x.numel())));
  const Tensor mine = parts[index(tp_.rank())];
  for (int r = 0; r < tp_.size(); ++r) received.push_back(staging_.slice(0, r * n, r * n + mine.numel()));
  // The own part stays where it is: an empty piece travels to oneself.
  std::vector<Tensor> to = received, from = parts;
  to[index(tp_.rank())] = from[index(tp_.rank())] = mine.slice(0, 0, 0);
  tp_.all_to_all(to, from)->wait();
  received[index(tp_.rank())] = mine;
  dev_.sum_pieces(mine, received, Write::overwrite);
  tp_.all_gather(parts, mine)->wait();
}

}  // namespace onescale

#include "parallel/tensor_parallel.h"

#include <algorithm>

namespace onescale {

void TensorParallel::all_reduce(Tensor x) const {
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

}  // namespace onescale

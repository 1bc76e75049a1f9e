// What a tensor-parallel rank holds of each parameter (Shoeybi et al. 2019, with the one K/V head of Shazeer 2019 kept
// whole on every rank): local shapes, and where local elements lie in the whole tensor.
#pragma once

#include <functional>

#include "parallel/parameter_table.h"

namespace onescale {

class TensorSlices {
 public:
  // Rows that do not divide by tp, the vocabulary's, are padded to equal local shapes; other sizes must divide.
  TensorSlices(const ParameterTable& whole, int tp, int tp_rank);

  const ParameterTable& whole() const { return whole_; }
  const ParameterTable& local() const { return local_; }  // the same rows with local shapes

  // Local elements from here on are the vocabulary's padding: part of no logical tensor, always zero.
  std::int64_t real(std::size_t parameter) const { return real_[parameter]; }
  // Local elements from here on are held by every rank of tp alike: 0 for a replicated tensor, the K/V rows of a fused
  // one, real() for none.
  std::int64_t replicated_from(std::size_t parameter) const { return replicated_from_[parameter]; }
  // Local elements from here on have a gradient that is partial over tp; real() for none.
  std::int64_t partial_from(std::size_t parameter) const { return partial_from_[parameter]; }

  // Calls fn(local, whole, count) for the longest runs of the local elements [begin, end) that lie together in the
  // whole tensor, ascending; padding is left out.
  void for_each_run(std::size_t parameter, std::int64_t begin, std::int64_t end,
                    const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& fn) const;

 private:
  ParameterTable whole_, local_;
  int tp_, tp_rank_;
  std::vector<std::int64_t> real_, replicated_from_, partial_from_;
};

}  // namespace onescale

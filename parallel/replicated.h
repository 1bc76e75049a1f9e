// Parameters and gradients held whole by every process (ZeRO stage 0, and a process alone).
#pragma once

#include "parallel/units.h"

namespace onescale {

class ReplicatedWeights final : public Weights {
 public:
  // dtype: of the compute copy.
  ReplicatedWeights(Device& device, const ParameterTable& table, const FlatLayout& layout, DType dtype);

  const Tensors& gather(int unit) override { return views_[static_cast<std::size_t>(unit)]; }
  void release(int) override {}
  Owned master(int unit) override { return {master_[static_cast<std::size_t>(unit)], 0}; }
  Tensor compute(int unit) override { return compute_[static_cast<std::size_t>(unit)]; }

 private:
  std::vector<Tensor> master_, compute_;
  std::vector<Tensors> views_;
};

class ReplicatedGradients final : public Gradients {
 public:
  ReplicatedGradients(Device& device, const ParameterTable& table, const FlatLayout& layout);

  void begin_step() override { used_.assign(flat_.size(), false); }
  Opened open(int unit) override {
    return {views_[static_cast<std::size_t>(unit)],
            used_[static_cast<std::size_t>(unit)] ? Write::accumulate : Write::overwrite};
  }
  void close(int unit) override { used_[static_cast<std::size_t>(unit)] = true; }
  Owned owned(int unit) override { return {flat_[static_cast<std::size_t>(unit)], 0}; }

 private:
  std::vector<Tensor> flat_;
  std::vector<Tensors> views_;
  std::vector<bool> used_;
};

}  // namespace onescale

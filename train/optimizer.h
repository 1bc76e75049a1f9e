// AdamW and SGD over the owned parts of all units.
#pragma once

#include <array>

#include "parallel/zero.h"

namespace onescale {

struct OptimizerSettings {
  bool adamw = true;  // otherwise plain SGD
  float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0;
};

class Optimizer {
 public:
  // Takes the moments' memory: two floats an owned element for AdamW, none for SGD.
  Optimizer(Device& device, const Placement& place, Weights& weights, const OptimizerSettings& settings);

  // One update of every owned element with the step's reduced gradients times `gradient_scale`. Weight decay acts where
  // the table says.
  void update(Weights& weights, Gradients& gradients, double lr, double gradient_scale);

  bool has_moments() const { return settings_.adamw; }
  // The owned part of a unit's first (0) or second (1) moments.
  const Owned& moments(int which, int unit) const {
    return moments_[static_cast<std::size_t>(which)][static_cast<std::size_t>(unit)];
  }
  std::int64_t updates() const { return updates_; }  // Adam's own count
  void set_updates(std::int64_t updates) { updates_ = updates; }

 private:
  Device& dev_;
  const Placement& place_;
  OptimizerSettings settings_;
  std::array<std::vector<Owned>, 2> moments_;  // by unit
  std::int64_t updates_ = 0;
};

}  // namespace onescale

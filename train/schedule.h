// The learning rate as a pure function of the step, so that a resume cannot lose or repeat any of it.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "train/options.h"

namespace onescale {

// The rate of step `step`, counted from 0, of o.steps. Warm-up is linear, lr * (step + 1) / warmup_steps. With x
// the share of the steps after warm-up that are done: cosine min_lr + (lr - min_lr) (1 + cos(pi x)) / 2, linear lr +
// (min_lr - lr) x, constant lr; wsd is lr until the last decay_steps, which lead linearly to min_lr. At and after
// o.steps: the end value.
inline double learning_rate(const Options& o, std::int64_t step) {
  const auto share = [](std::int64_t done, std::int64_t of) {
    return of > 0 && done < of ? static_cast<double>(done) / static_cast<double>(of) : 1.0;
  };
  const auto line = [&](double x) { return o.lr + (o.min_lr - o.lr) * x; };
  if (step < o.warmup_steps) return o.lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup_steps);
  const double x = share(step - o.warmup_steps, o.steps - o.warmup_steps);
  if (o.schedule == "cosine") return o.min_lr + 0.5 * (o.lr - o.min_lr) * (1 + std::cos(std::numbers::pi * x));
  if (o.schedule == "linear") return line(x);
  const std::int64_t decay_from = o.steps - o.decay_steps;
  if (o.schedule == "wsd" && step >= decay_from) return line(share(step - decay_from, o.decay_steps));
  return o.lr;
}

}  // namespace onescale

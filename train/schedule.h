// The learning rate as a pure function of the step, so that a resume cannot lose or repeat any of it.
#pragma once

#include <cstdint>

#include "train/options.h"

namespace onescale {

// The rate of step `step`, counted from 0, of options.steps. Warm-up is linear, lr * (step + 1) / warmup_steps. With x
// the share of the steps after warm-up that are done: cosine min_lr + (lr - min_lr) (1 + cos(pi x)) / 2, linear lr +
// (min_lr - lr) x, constant lr; wsd is lr until the last decay_steps, which lead linearly to min_lr. At and after
// options.steps: the end value.
double learning_rate(const Options& options, std::int64_t step);

}  // namespace onescale

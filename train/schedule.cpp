#include "train/schedule.h"

#include <cmath>
#include <numbers>

namespace onescale {

double learning_rate(const Options& o, std::int64_t step) {
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

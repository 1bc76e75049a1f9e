#include "train/step.h"

#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "parallel/clip_norm.h"

namespace onescale {

std::int64_t count_good_tokens(const std::int32_t* labels, std::int64_t n) {
  return std::count_if(labels, labels + n, [](std::int32_t label) { return label != -100; });
}

Step::Step(ModelWeights& weights, const StepSettings& settings)
    : weights_(weights),
      dev_(weights.device()),
      settings_(settings),
      gradients_(dev_, weights.table(), weights.layout()),
      optimizer_(dev_, weights.table(), weights.layout(), weights.units(), settings.optimizer),
      model_(dev_, weights.config(), settings.micro_batch, settings.seq_len, settings.dtype, settings.recompute, true),
      scalar_(dev_.allocate(Kind::workspace, DType::float64, {1})) {}

StepResult Step::gradients(const HostRows& batch, std::uint64_t seed, std::int64_t step) {
  const std::int64_t B = settings_.micro_batch, T = settings_.seq_len;
  check_usage(batch.rows > 0 && batch.rows % B == 0, "micro_batch ", B, " does not divide the step's ", batch.rows,
              " rows");
  StepResult result;
  result.good_tokens = count_good_tokens(batch.labels, batch.rows * T);
  const float weight =
      result.good_tokens > 0 ? static_cast<float>(1.0 / static_cast<double>(result.good_tokens)) : 0.0f;

  gradients_.begin_step();
  dev_.fill(scalar_, 0);
  for (std::int64_t row = 0; row < batch.rows; row += B) {
    model_.forward_backward(scalar_, {batch.ids + row * T, batch.labels + row * T, row, seed, step}, weights_.units(),
                            gradients_, weight);
  }
  double loss_sum = 0;
  dev_.download(&loss_sum, scalar_);
  result.loss = result.good_tokens > 0 ? loss_sum / static_cast<double>(result.good_tokens) : 0;
  result.grad_norm = gradient_norm(dev_, gradients_, weights_.table().units, scalar_);
  result.clip_coef = clip_coefficient(result.grad_norm, settings_.clip_norm);
  if (result.good_tokens == 0)
    result.outcome = StepResult::Outcome::no_good_tokens;
  else if (!std::isfinite(result.grad_norm) || !std::isfinite(result.loss))
    result.outcome = StepResult::Outcome::not_finite;
  return result;
}

StepResult Step::run(const HostRows& batch, std::uint64_t seed, std::int64_t step, double lr) {
  const StepResult result = gradients(batch, seed, step);
  if (result.outcome == StepResult::Outcome::updated)
    optimizer_.update(weights_.units(), gradients_, lr, result.clip_coef);
  return result;
}

void Step::run_empty() {
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(settings_.micro_batch * settings_.seq_len), 0);
  run({zeros.data(), zeros.data(), settings_.micro_batch}, 0, 0, 0.0);
}

void Step::read_gradient(std::size_t parameter, float* out) {
  dev_.download(out, weights_.part(gradients_.owned(weights_.table().parameters[parameter].unit).data, parameter));
}

void Step::read_moments(int which, std::size_t parameter, float* out) {
  dev_.download(out, weights_.part(optimizer_.moments(which, weights_.table().parameters[parameter].unit), parameter));
}

void Step::load_moments(int which, const Fetch& fetch) {
  std::vector<float> whole;
  for (std::size_t i = 0; i < weights_.table().parameters.size(); ++i) {
    const Parameter& p = weights_.table().parameters[i];
    whole.resize(static_cast<std::size_t>(p.numel()));
    fetch(i, whole.data());
    dev_.upload(weights_.part(optimizer_.moments(which, p.unit), i), whole.data());
  }
}

}  // namespace onescale

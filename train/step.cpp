#include "train/step.h"

#include <algorithm>
#include <cmath>

#include "kernels/error.h"

namespace onescale {

std::int64_t count_good_tokens(const std::int32_t* labels, std::int64_t n) {
  return std::count_if(labels, labels + n, [](std::int32_t label) { return label != -100; });
}

namespace {

// What the data-parallel ranks tell each other of their rows.
struct Rows {
  std::int64_t good_tokens;
  std::uint64_t hash;
};

// Rows are hashed one by one (FNV-1a) with their place in the global batch, so that the sum does not depend on who has
// them.
Rows describe(const HostRows& batch, std::int64_t seq_len, std::int64_t first_row) {
  Rows rows{count_good_tokens(batch.labels, batch.rows * seq_len), 0};
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    std::uint64_t hash = 0xcbf29ce484222325 + static_cast<std::uint64_t>(first_row + row);
    for (std::int64_t i = row * seq_len; i < (row + 1) * seq_len; ++i) {
      hash = (hash ^ static_cast<std::uint32_t>(batch.ids[i])) * 0x100000001b3;
      hash = (hash ^ static_cast<std::uint32_t>(batch.labels[i])) * 0x100000001b3;
    }
    rows.hash += hash;
  }
  return rows;
}

}  // namespace

Step::Step(ModelWeights& weights, const StepSettings& settings)
    : weights_(weights),
      dev_(weights.device()),
      mesh_(weights.mesh()),
      settings_(settings),
      gradients_(make_gradients(dev_, mesh_, weights.place(), settings.zero)),
      optimizer_(dev_, weights.place(), weights.units(), settings.optimizer),
      model_(dev_, mesh_, weights.config(), settings.sp_mode, settings.micro_batch, settings.seq_len,
             settings.zero.dtype, settings.recompute, true),
      scalar_(dev_.allocate(Kind::workspace, DType::float64, {1})) {
  dev_.after_each([&mesh = mesh_] { mesh.progress(); });
}

StepResult Step::gradients(const HostRows& batch, std::uint64_t seed, std::int64_t step) {
  const std::int64_t B = settings_.micro_batch, T = settings_.seq_len;
  check_usage(batch.rows > 0 && batch.rows % B == 0, "micro_batch ", B, " does not divide the ", batch.rows,
              " rows of a rank");
  const std::int64_t first_row = mesh_.layout.dp_rank() * batch.rows;
  StepResult result;
  for (const Rows& rows : mesh_.dp->exchange(describe(batch, T, first_row))) {
    result.good_tokens += rows.good_tokens;
    result.batch_hash += rows.hash;
  }
  const float weight =
      result.good_tokens > 0 ? static_cast<float>(1.0 / static_cast<double>(result.good_tokens)) : 0.0f;

  gradients_->begin_step(batch.rows / B);
  dev_.fill(scalar_, 0);
  for (std::int64_t row = 0; row < batch.rows; row += B) {
    model_.forward_backward(scalar_, {batch.ids + row * T, batch.labels + row * T, first_row + row, seed, step},
                            weights_.units(), *gradients_, weight);
  }
  double own_loss = 0, loss_sum = 0;
  dev_.download(&own_loss, scalar_);
  gradients_->finish();
  for (const double loss : mesh_.shard->exchange(own_loss)) loss_sum += loss;
  result.loss = result.good_tokens > 0 ? loss_sum / static_cast<double>(result.good_tokens) : 0;
  result.grad_norm = gradient_norm(dev_, mesh_, weights_.place(), *gradients_, scalar_);
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
    optimizer_.update(weights_.units(), *gradients_, lr, result.clip_coef);
  return result;
}

void Step::run_empty(std::int64_t micro_batches) {
  const std::int64_t rows = micro_batches * settings_.micro_batch;
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(rows * settings_.seq_len), 0);
  run({zeros.data(), zeros.data(), rows}, 0, 0, 0.0);
  model_.run_head_empty();
}

}  // namespace onescale

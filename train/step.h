// One training step: N, the micro-batches' gradients, the norm, the clip and the update, under the one scaling
// convention: every good token of the step has the weight 1/N, and whatever adds gradients only adds.
#pragma once

#include "model/gpt_bigcode.h"
#include "train/model_weights.h"
#include "train/optimizer.h"

namespace onescale {

struct StepSettings {
  std::int64_t micro_batch = 1, seq_len = 1;
  DType dtype = DType::float32;
  Recompute recompute = Recompute::none;
  OptimizerSettings optimizer;
  double clip_norm = 0;  // 0: no clipping
};

// Rows on the host: ids and labels [rows, seq_len], labels already shifted, -100 ignored.
struct HostRows {
  const std::int32_t* ids;
  const std::int32_t* labels;
  std::int64_t rows;
};

struct StepResult {
  double loss = 0;  // sum of the good tokens' losses / N
  std::int64_t good_tokens = 0;
  double grad_norm = 0, clip_coef = 1;  // the norm before clipping
  enum class Outcome : std::uint8_t { updated, no_good_tokens, not_finite } outcome = Outcome::updated;
};

class Step {
 public:
  Step(ModelWeights& weights, const StepSettings& settings);

  // Gradients of the batch's mean loss over its good tokens, without an update. seed and step key the dropout.
  StepResult gradients(const HostRows& batch, std::uint64_t seed, std::int64_t step);
  // The same, then clipping and the update; skipped when no token is good or the norm is not finite.
  StepResult run(const HostRows& batch, std::uint64_t seed, std::int64_t step, double lr);
  // A step over zeros, for a dry run.
  void run_empty();

  // Whole logical tensors in table order.
  void read_gradient(std::size_t parameter, float* out);
  void read_moments(int which, std::size_t parameter, float* out);
  void load_moments(int which, const Fetch& fetch);

  Optimizer& optimizer() { return optimizer_; }
  GptBigCode& model() { return model_; }

 private:
  ModelWeights& weights_;
  Device& dev_;
  StepSettings settings_;
  ReplicatedGradients gradients_;
  Optimizer optimizer_;
  GptBigCode model_;
  Tensor scalar_;  // float64 [1]
};

// The number of good tokens: labels that are not -100.
std::int64_t count_good_tokens(const std::int32_t* labels, std::int64_t n);

}  // namespace onescale

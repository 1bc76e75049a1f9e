// One training step: N, the micro-batches' gradients, the norm, the clip and the update, under the one scaling
// convention: every good token of the step has the weight 1/N, and whatever adds gradients only adds.
#pragma once

#include "model/gpt_bigcode.h"
#include "parallel/clip_norm.h"
#include "train/model_weights.h"
#include "train/optimizer.h"

namespace onescale {

struct StepSettings {
  std::int64_t micro_batch = 1, seq_len = 1;  // rows of one rank at once; tokens of a whole row
  ZeroSettings zero;
  SpMode sp_mode = SpMode::ulysses;
  Recompute recompute = Recompute::none;
  OptimizerSettings optimizer;
  double clip_norm = 0;  // 0: no clipping
};

// Rows on the host: ids and labels [rows, seq_len] of whole rows, labels already shifted, -100 ignored. Of a global
// batch, data-parallel rank r has the rows [r * rows, (r + 1) * rows).
struct HostRows {
  const std::int32_t* ids;
  const std::int32_t* labels;
  std::int64_t rows;
};

// The same on every rank.
struct StepResult {
  double loss = 0;  // sum of the good tokens' losses / N
  std::int64_t good_tokens = 0;
  std::uint64_t batch_hash = 0;         // of the global batch: its ids and labels by row
  double grad_norm = 0, clip_coef = 1;  // the norm before clipping
  enum class Outcome : std::uint8_t { updated, no_good_tokens, not_finite } outcome = Outcome::updated;
};

// Every rank of the weights' mesh makes the same calls.
class Step {
 public:
  // weights were made with the settings' zero.
  Step(ModelWeights& weights, const StepSettings& settings);
  ~Step() { dev_.after_each({}); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // Gradients of the batch's mean loss over its good tokens, without an update. seed and step key the dropout.
  StepResult gradients(const HostRows& batch, std::uint64_t seed, std::int64_t step);
  // The same, then clipping and the update; skipped when no token is good or the norm is not finite.
  StepResult run(const HostRows& batch, std::uint64_t seed, std::int64_t step, double lr);
  // A step of `micro_batches` over zeros, for a dry run.
  void run_empty(std::int64_t micro_batches = 1);

  // The step's reduced gradients, and the first (0) or second (1) moments, to assemble.
  Assembly::Source gradient_source() {
    return [this](int unit) { return gradients_->owned(unit); };
  }
  Assembly::Source moment_source(int which) {
    return [this, which](int unit) { return optimizer_.moments(which, unit); };
  }
  void load_moments(int which, const FetchRange& fetch) {
    load_owned(dev_, weights_.place(), moment_source(which), fetch);
  }

  Optimizer& optimizer() { return optimizer_; }
  GptBigCode& model() { return model_; }

 private:
  ModelWeights& weights_;
  Device& dev_;
  Mesh& mesh_;
  StepSettings settings_;
  std::unique_ptr<Gradients> gradients_;
  Optimizer optimizer_;
  GptBigCode model_;
  Tensor scalar_;  // float64 [1]
};

// The number of good tokens: labels that are not -100.
std::int64_t count_good_tokens(const std::int32_t* labels, std::int64_t n);

}  // namespace onescale

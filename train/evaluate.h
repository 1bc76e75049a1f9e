// The loss on held-out text.
#pragma once

#include <functional>

#include "data/batches.h"
#include "data/tokenizer.h"
#include "train/step.h"

namespace onescale {

struct EvalResult {
  double loss_sum = 0;  // nats
  std::int64_t good_tokens = 0;
  std::int64_t bytes = 0;  // of text that the good tokens stand for; 0 without a tokenizer

  double loss() const;  // nats a token; NaN where no token is good
  double perplexity() const;
  double bits_per_byte() const;  // NaN when no bytes are known
  std::string text() const;      // "loss 2.1034 (perplexity 8.19, 0.91 bits per byte) on 40960 tokens"
};

// Every rank of the weights' mesh makes the same calls; data-parallel ranks share the rows.
class Evaluator {
 public:
  // model: built for micro-batches of micro_batch rows of seq_len tokens; that of a training step will do.
  Evaluator(ModelWeights& weights, GptBigCode& model, std::int64_t micro_batch, std::int64_t seq_len);

  // Over the first `samples` windows in the order of `batches` (0: one epoch). Returns early with what it has when
  // `stop`, which answers alike on every rank, says so.
  EvalResult run(Batches& batches, const Tokenizer* tokenizer, std::int64_t samples, const std::function<bool()>& stop);

  // A micro-batch of zeros, for a dry run.
  void run_empty();

 private:
  // Adds the losses of up to micro_batch rows, without dropout.
  void add(const Batch& batch);

  ModelWeights& weights_;
  GptBigCode& model_;
  std::int64_t micro_batch_, seq_len_;
  Tensor sum_;  // float64 [1]
};

}  // namespace onescale

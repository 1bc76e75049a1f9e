// The language-model head with its loss: final LayerNorm, product with the vocabulary, cross-entropy. Only good tokens
// are computed, in chunks, so the logits are never whole in memory and an ignored prompt costs nothing. Tensor-parallel
// ranks hold a share of the vocabulary each, and combine the softmax's statistics (Shoeybi et al. 2019).
#pragma once

#include "model/config.h"
#include "parallel/tensor_parallel.h"
#include "parallel/units.h"

namespace onescale {

class Head {
 public:
  // n: tokens of a micro-batch. dtype: of activations. train: room for gradients too.
  Head(Device& device, const ModelConfig& config, const ModelShard& shard, const TensorParallel& tp, std::int64_t n,
       DType dtype, bool train);

  // Sets the good tokens of the micro-batch: labels [n] on the host, ids of the vocabulary or -100, which is ignored.
  void set_labels(const std::vector<std::int32_t>& labels);

  // loss_sum float64 [1] += the losses of the good tokens. x [n, C].
  void loss(Tensor loss_sum, Tensor x, Weights& weights);

  // The same with gradients: each good token's loss is weighted by `weight`. dx [n, C] is overwritten with the gradient
  // of x. The gradients of the final LayerNorm are closed, and those of the table unless it is tied: the embedding adds
  // to it.
  void loss_backward(Tensor loss_sum, Tensor dx, Tensor x, Weights& weights, Gradients& gradients, float weight);

  // For a dry run: what any number of good tokens needs, which the labels decide. Fewer rows may need more scratch.
  void run_empty();

  // The logits [tp * shard.vocab] of the last of the given rows x [n, C]; those from vocab_size on are padding.
  void last_logits(Tensor logits, Tensor x, Weights& weights);

 private:
  int ln_f_unit() const { return static_cast<int>(config_.n_layer) + 1; }
  int table_unit() const { return config_.tie_word_embeddings ? 0 : ln_f_unit() + 1; }
  void release(Weights& weights) const;
  Tensor chosen(Tensor buffer) const { return buffer.slice(0, 0, good_); }
  void normalise(Tensor x, const Tensors& ln_f);
  // One chunk [begin, end) of the good tokens: logits, statistics, loss; weight 0: no gradient.
  Tensor chunk(Tensor loss_sum, Tensor table, std::int64_t begin, std::int64_t end, float weight);

  Device& dev_;
  const ModelConfig& config_;
  const ModelShard& shard_;
  const TensorParallel& tp_;
  std::int64_t chunk_rows_, good_ = 0;
  Tensor labels_, index_;            // int32 [n]
  Tensor x_, y_, mean_, rstd_, dy_;  // good tokens only: float32 [n, C], [n, C], float32 [n] twice, [n, C]
  Tensor dx_;                        // float32 [n, C]: y where that is float32, which is no longer needed then
  Tensor logits_, stats_, losses_;   // [chunk, shard.vocab], float32 [chunk, 3], float32 [chunk]
  Tensor parts_;                     // float32 [tp, chunk, 3]
};

}  // namespace onescale

// Decoding one sequence token by token with a key/value cache.
#pragma once

#include "model/gpt_bigcode.h"

namespace onescale {

class Decoder {
 public:
  // Computes in the buffers of a model, which may be one in training. capacity: the most tokens of prompt and
  // continuation together, at most n_positions.
  // Tensor-parallel ranks decode together; all other ranks of a mesh do the same work, and every rank receives rank 0's
  // logits.
  Decoder(GptBigCode& model, std::int64_t capacity);

  void reset();
  std::int64_t length() const { return caches_[0].length; }
  std::int64_t capacity() const { return caches_[0].kv.dim(1); }
  // Appends the ids, at least one, and returns the logits [vocab_size] after the last one; the reference lives until
  // the next call.
  const std::vector<float>& append(std::span<const std::int32_t> ids, Weights& weights);

 private:
  GptBigCode& model_;
  std::vector<KvCache> caches_;
  Tensor ids_, positions_, first_;  // int32
  Tensor logits_, float_logits_;
  std::vector<float> host_logits_;
};

}  // namespace onescale

// Decoding one sequence token by token with a key/value cache.
#pragma once

#include <span>

#include "model/block.h"
#include "model/head.h"
#include "parallel/mesh.h"

namespace onescale {

class Decoder {
 public:
  // capacity: the most tokens of prompt and continuation together, at most n_positions.
  // Tensor-parallel ranks decode together; all other ranks of a mesh do the same work, and every rank receives rank 0's
  // logits.
  Decoder(Device& device, Mesh& mesh, const ModelConfig& config, std::int64_t capacity, DType dtype);
  Decoder(const Decoder&) = delete;  // its parts refer to each other
  Decoder& operator=(const Decoder&) = delete;

  void reset();
  std::int64_t length() const { return caches_[0].length; }
  std::int64_t capacity() const { return caches_[0].kv.dim(1); }
  // Appends the ids and returns the logits [vocab_size] after the last one; the reference lives until the next call.
  const std::vector<float>& append(std::span<const std::int32_t> ids, Weights& weights);

 private:
  void pass(std::span<const std::int32_t> ids, Weights& weights, bool last);

  Device& dev_;
  Communicator& world_;
  ModelConfig config_;
  ModelShard shard_;
  TensorParallel tp_;
  Attention attention_;
  std::vector<KvCache> caches_;
  Tensor ids_, positions_, first_, last_, float_logits_, logits_;
  BlockSaved saved_;
  BlockScratch scratch_;
  Head head_;
  std::vector<float> host_logits_;
};

}  // namespace onescale

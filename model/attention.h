// Causal attention over a row's tokens, which sequence-parallel ranks may share.
#pragma once

#include "model/config.h"
#include "model/pass.h"
#include "parallel/sequence.h"

namespace onescale {

// What attention's forward pass leaves for its backward pass, besides the fused projection. t local, T all tokens.
struct AttentionSaved {
  Tensor o;    // [n, width]
  Tensor lse;  // float32, one a query and head
  // When heads are shared out over sequence-parallel ranks, instead of the projection:
  Tensor q, o_heads;  // [B, T, heads / sp, d]
  Tensor kv;          // K and V of the one head [B, t, 1, 2d], or of this rank's heads [B, T, heads / sp, 2d]
};

// Keys and values of the tokens before, for decoding: [B, capacity, h_kv, 2d], of which `length` tokens are valid.
struct KvCache {
  Tensor kv;
  std::int64_t length = 0;
};

class Attention {
 public:
  // rows x seq_len: a micro-batch before it is cut over sp, which divides the heads in mode ulysses. train: room for
  // the backward pass.
  Attention(Device& device, const ModelConfig& config, const ModelShard& shard, SequenceParallel& sp, std::int64_t rows,
            std::int64_t seq_len, DType dtype, bool train);

  // Whether the projection is needed after the forward pass.
  bool keeps_projection() const { return !by_heads_; }
  AttentionSaved allocate() const;

  // s.o = attention of the projection qkv [n, shard.qkv]. With a cache, over it and the pass's own tokens, which are
  // appended.
  void forward(const AttentionSaved& s, Tensor qkv, const Pass& pass, std::int64_t layer, KvCache* cache);
  // dqkv [n, shard.qkv] is overwritten with the gradient of the projection, given that of o.
  void backward(Tensor dqkv, Tensor do_, const AttentionSaved& s, Tensor qkv, const Pass& pass, std::int64_t layer);

 private:
  // {q [B, t, h, d], kv [B, t, h_kv, 2d]}, views of the projection. One K/V head: a token's row is [Q: h heads of d | K
  // | V]. One per head: the rows are interleaved, [q_0 k_0 v_0 | q_1 k_1 v_1 | ...].
  std::pair<Tensor, Tensor> heads(Tensor qkv, const Pass& pass) const;
  Tensor all_kv(Tensor kv, std::int64_t layer);  // of all tokens, as far as this rank's queries see them
  Dropout dropout(const Pass& pass, std::int64_t layer) const;

  Device& dev_;
  const ModelConfig& config_;
  const ModelShard& shard_;
  SequenceParallel& sp_;
  std::int64_t rows_, seq_len_;
  bool by_heads_;
  DType dtype_;
  Tensor kv_, dkv_;             // [B, T, h_kv, 2d], gathered
  std::int64_t held_ = -1;      // the layer whose keys and values kv_ holds
  Tensor do_heads_, dq_heads_;  // [B, T, heads / sp, d]
};

}  // namespace onescale

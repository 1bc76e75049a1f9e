// The GPTBigCode model: embeddings, blocks, head. Explicit forward and backward; where weights and gradients live is
// hidden behind the unit protocols of parallel/units.h.
#pragma once

#include <memory>

#include "model/block.h"
#include "model/head.h"
#include "parallel/mesh.h"

namespace onescale {

// One micro-batch on the host: ids and labels [rows, seq_len] of whole rows, labels already shifted, -100 ignored.
struct MicroBatch {
  const std::int32_t* ids;
  const std::int32_t* labels;
  std::int64_t first_row = 0;  // of the global batch, for the dropout keys
  std::uint64_t seed = 0;
  std::int64_t step = 0;
};

class GptBigCode {
 public:
  // rows x seq_len: the shape of every micro-batch, of which this rank computes its sp rank's tokens. train: room for
  // the backward pass.
  GptBigCode(Device& device, Mesh& mesh, const ModelConfig& config, SpMode sp_mode, std::int64_t rows,
             std::int64_t seq_len, DType dtype, Recompute recompute, bool train);
  GptBigCode(const GptBigCode&) = delete;  // its parts refer to each other
  GptBigCode& operator=(const GptBigCode&) = delete;

  // Forward and backward. loss_sum float64 [1] += the losses of this rank's good tokens; gradients are those of
  // `weight` times that sum.
  void forward_backward(Tensor loss_sum, const MicroBatch& batch, Weights& weights, Gradients& gradients, float weight);
  // Forward without dropout; token_loss float32 [rows * seq_len / sp], one a token of this rank, as Head::loss, or
  // empty.
  void forward(Tensor loss_sum, Tensor token_loss, const MicroBatch& batch, Weights& weights);

 private:
  int ln_f_unit() const { return static_cast<int>(config_.n_layer) + 1; }
  int table_unit() const { return config_.tie_word_embeddings ? 0 : ln_f_unit() + 1; }
  Pass begin(const MicroBatch& batch, bool dropout);
  // The buffers of one block; those that no recompute mode keeps a layer are `shared` with another one.
  BlockSaved allocate_saved(DType dtype, const BlockSaved* shared);
  Block block(std::size_t layer) { return {dev_, config_, attention_, tp_, static_cast<std::int64_t>(layer)}; }
  Tensor blocks_forward(const Pass& pass, Weights& weights);  // the last block's output

  Device& dev_;
  ModelConfig config_;
  ModelShard shard_;
  Recompute recompute_;
  std::int64_t seq_len_;
  std::vector<std::int32_t> local_positions_;  // of this rank's tokens in a row
  TensorParallel tp_;
  SequenceParallel sp_;
  Attention attention_;
  Tensor ids_, positions_;          // int32 [n], [B, t]: this rank's tokens
  Tensor query_positions_, first_;  // int32: of attention's queries
  std::vector<std::int32_t> host_ids_, host_labels_;
  std::vector<BlockSaved> saved_;  // one a layer; buffers that are not kept are shared between layers
  Tensor x_out_;                   // the last block's output
  Tensor dx_;
  BlockScratch scratch_;
  Head head_;
};

}  // namespace onescale

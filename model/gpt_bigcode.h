// The GPTBigCode model: embeddings, blocks, head. Explicit forward and backward; where weights and gradients live is
// hidden behind the unit protocols of parallel/units.h.
#pragma once

#include <span>

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
  // Forward without dropout.
  void forward(Tensor loss_sum, const MicroBatch& batch, Weights& weights);
  // For a dry run, beside one of these: see Head::run_empty.
  void run_head_empty() { head_.run_empty(); }

 private:
  friend class Decoder;  // which computes in the same buffers

  Pass begin(const MicroBatch& batch, bool train);
  void allocate_saved(DType dtype, bool train);
  Block block(std::size_t layer, const BlockScratch& scratch, const Pass& pass, const Tensors& unit) {
    return {dev_, config_, attention_, tp_, scratch, pass, static_cast<std::int64_t>(layer), BlockTensors(unit)};
  }
  // The last block's output, and in training what the backward pass needs. ids int32 [n]. With caches, one a layer, see
  // Block::forward.
  Tensor hidden(Tensor ids, const Pass& pass, Weights& weights, std::span<KvCache> caches = {});

  Device& dev_;
  Mesh& mesh_;
  ModelConfig config_;
  ModelShard shard_;
  Recompute recompute_;
  std::int64_t seq_len_;
  std::vector<std::int32_t> local_positions_;  // of this rank's tokens in a row
  TensorParallel tp_;
  SequenceParallel sp_;
  Attention attention_;
  Head head_;
  Tensor ids_, positions_;          // int32 [n], [B, t]: this rank's tokens
  Tensor query_positions_, first_;  // int32: of attention's queries
  // In training one a layer; buffers that are not kept are shared between layers. Then the last block's output as x.
  std::vector<BlockSaved> saved_;
  Tensor dx_;
  BlockScratch scratch_;
};

}  // namespace onescale

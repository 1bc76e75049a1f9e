#include "model/gpt_bigcode.h"

#include <algorithm>

#include "kernels/error.h"

namespace onescale {

namespace {

// Elements of the largest tensor that sequence parallelism exchanges, of all ranks' pieces together.
std::int64_t largest_exchange(const ModelConfig& config, const ModelShard& shard, SpMode mode, std::int64_t tokens,
                              int sp) {
  const std::int64_t d = config.head_size(), gathered = tokens * shard.kv_heads * 2 * d;
  if (mode == SpMode::gather_kv) return gathered;
  const std::int64_t by_heads = tokens / sp * shard.width;
  return config.multi_query ? std::max(by_heads, gathered) : 2 * by_heads;
}

}  // namespace

GptBigCode::GptBigCode(Device& device, Mesh& mesh, const ModelConfig& config, SpMode sp_mode, std::int64_t rows,
                       std::int64_t seq_len, DType dtype, Recompute recompute, bool train)
    : dev_(device),
      mesh_(mesh),
      config_(config),
      shard_(config, mesh.layout.tp, mesh.layout.tp_rank()),
      recompute_(recompute),
      seq_len_(seq_len),
      local_positions_(local_positions(sp_mode, seq_len, mesh.layout.sp, mesh.layout.sp_rank())),
      tp_(device, *mesh.tp, rows * seq_len / mesh.layout.sp * config.n_embd),
      sp_(device, *mesh.sp, sp_mode, largest_exchange(config_, shard_, sp_mode, rows * seq_len, mesh.layout.sp), dtype),
      attention_(device, config_, shard_, sp_, rows, seq_len, dtype, train),
      head_(device, config_, shard_, tp_, rows * seq_len / mesh.layout.sp, dtype, train) {
  check_usage(seq_len >= 1 && seq_len <= config.n_positions, "seq_len ", seq_len,
              " is not between 1 and the model's n_positions ", config.n_positions);
  const auto t = static_cast<std::int64_t>(local_positions_.size());
  const auto upload_rows = [&](const std::vector<std::int32_t>& row) {
    const Tensor all = device.allocate(Kind::batches, DType::int32, {rows, std::ssize(row)});
    for (std::int64_t b = 0; b < rows; ++b) device.upload(all.slice(0, b, b + 1), row.data());
    return all;
  };
  ids_ = device.allocate(Kind::batches, DType::int32, {rows * t});
  positions_ = upload_rows(local_positions_);
  query_positions_ = attention_.keeps_projection() ? positions_ : upload_rows(local_positions(sp_mode, seq_len, 1, 0));
  first_ = device.allocate(Kind::batches, DType::int32, {rows, query_positions_.dim(1)});
  allocate_saved(dtype, train);
}

void GptBigCode::allocate_saved(DType dtype, bool train) {
  const std::int64_t n = ids_.numel(), C = config_.n_embd, I = shard_.inner, Q = shard_.qkv;
  const bool most = recompute_ != Recompute::block, all = recompute_ == Recompute::none;
  BlockSaved s;
  for (std::int64_t layer = 0; layer < (train ? config_.n_layer : 1); ++layer) {
    // What a layer does not keep is that of the layer before.
    const auto take = [&](bool kept, Tensor& t, DType type, std::int64_t width) {
      if (kept || layer == 0) t = dev_.allocate(Kind::activations, type, {n, width});
    };
    take(true, s.x, DType::float32, C);
    for (Tensor* t : {&s.a, &s.m}) take(all, *t, dtype, C);
    for (Tensor* t : {&s.mean_1, &s.rstd_1, &s.mean_2, &s.rstd_2}) take(most, *t, DType::float32, 1);
    take(most && attention_.keeps_projection(), s.qkv, dtype, Q);
    if (most || layer == 0) s.attention = attention_.allocate();
    take(most, s.x_mid, DType::float32, C);
    take(most, s.f, dtype, I);
    take(all, s.g, dtype, I);
    saved_.push_back(s);
  }
  scratch_.y = dev_.allocate(Kind::workspace, dtype, {n, C});
  if (!train) return;
  s.x = dev_.allocate(Kind::activations, DType::float32, {n, C});
  saved_.push_back(s);
  dx_ = dev_.allocate(Kind::workspace, DType::float32, {n, C});
  scratch_.dc = dev_.allocate(Kind::workspace, dtype, {n, C});
  scratch_.dg = dev_.allocate(Kind::workspace, dtype, {n, I});
  scratch_.dqkv = dev_.allocate(Kind::workspace, dtype, {n, Q});
}

Pass GptBigCode::begin(const MicroBatch& batch, bool train) {
  std::vector<std::int32_t> ids, labels;
  for (std::int64_t b = 0; b < positions_.dim(0); ++b) {
    for (const std::int32_t position : local_positions_) {
      const std::int64_t at = b * seq_len_ + position;
      ids.push_back(batch.ids[at]);
      labels.push_back(batch.labels[at]);
    }
  }
  dev_.upload(ids_, ids.data());
  head_.set_labels(labels);
  return {positions_, {first_, query_positions_}, batch.seed, batch.step, batch.first_row, train};
}

Tensor GptBigCode::hidden(Tensor ids, const Pass& pass, Weights& weights, std::span<KvCache> caches) {
  // Without a backward pass one layer's buffers serve all: a block may overwrite what it has read.
  const BlockSaved only = saved_[0].first(ids.numel());
  BlockScratch scratch = scratch_;
  scratch.y = scratch_.y.slice(0, 0, ids.numel());
  const Tensors& embeddings = weights.gather(0, 1);
  Tensor x = only.x;
  dev_.gather_rows(x, embeddings[0], ids, shard_.first_id);
  tp_.all_reduce(x);
  dev_.add_positions(pass.by_row(x), pass.positions, embeddings[1], pass.drop(config_.embd_pdrop, Site::embedding, 0));
  weights.release(0);
  for (std::size_t layer = 0; layer < static_cast<std::size_t>(config_.n_layer); ++layer) {
    const int unit = static_cast<int>(layer) + 1;
    if (pass.train) x = saved_[layer + 1].x;
    block(layer, scratch, pass, weights.gather(unit, unit + 1))
        .forward(x, pass.train ? saved_[layer] : only, caches.empty() ? nullptr : &caches[layer]);
    weights.release(unit);
  }
  return x;
}

void GptBigCode::forward(Tensor loss_sum, const MicroBatch& batch, Weights& weights) {
  const Pass pass = begin(batch, false);
  head_.loss(loss_sum, hidden(ids_, pass, weights), weights);
}

void GptBigCode::forward_backward(Tensor loss_sum, const MicroBatch& batch, Weights& weights, Gradients& gradients,
                                  float weight) {
  const Pass pass = begin(batch, true);
  // The tied table's gradient is opened by the head, and closed after the embedding's share has been added.
  head_.loss_backward(loss_sum, dx_, hidden(ids_, pass, weights), weights, gradients, weight);
  for (auto layer = static_cast<std::size_t>(config_.n_layer); layer-- > 0;) {
    const int unit = static_cast<int>(layer) + 1;
    const Block of_layer = block(layer, scratch_, pass, weights.gather(unit, layer > 0 ? unit - 1 : -1));
    const auto opened = gradients.open(unit);
    of_layer.restore(saved_[layer], recompute_);
    of_layer.backward(dx_, saved_[layer], BlockTensors(opened.tensors), opened.write);
    weights.release(unit);
    gradients.close(unit);
  }
  const auto dembeddings = gradients.open(0);
  dev_.dropout(pass.by_row(dx_), pass.drop(config_.embd_pdrop, Site::embedding, 0));
  dev_.gather_rows_backward(dembeddings.tensors[1], dx_, pass.positions, 0, dembeddings.write);
  dev_.gather_rows_backward(dembeddings.tensors[0], dx_, ids_, shard_.first_id,
                            config_.tie_word_embeddings ? Write::accumulate : dembeddings.write);
  gradients.close(0);
}

}  // namespace onescale

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

BlockSaved GptBigCode::allocate_saved(DType dtype, const BlockSaved* shared) {
  const std::int64_t n = ids_.numel();
  const auto own = [&](bool kept, Tensor BlockSaved::*member, DType type, std::initializer_list<std::int64_t> shape) {
    return kept || !shared ? dev_.allocate(Kind::activations, type, shape) : shared->*member;
  };
  const bool all = recompute_ == Recompute::none, most = recompute_ != Recompute::block;
  const DType f32 = DType::float32;
  BlockSaved s;
  s.x = own(true, &BlockSaved::x, dtype, {n, config_.n_embd});
  s.a = own(all, &BlockSaved::a, dtype, {n, config_.n_embd});
  s.mean_1 = own(most, &BlockSaved::mean_1, f32, {n});
  s.rstd_1 = own(most, &BlockSaved::rstd_1, f32, {n});
  s.qkv = own(most && attention_.keeps_projection(), &BlockSaved::qkv, dtype, {n, shard_.qkv});
  s.attention = attention_.allocate(most, shared ? &shared->attention : nullptr);
  s.x_mid = own(most, &BlockSaved::x_mid, dtype, {n, config_.n_embd});
  s.m = own(all, &BlockSaved::m, dtype, {n, config_.n_embd});
  s.mean_2 = own(most, &BlockSaved::mean_2, f32, {n});
  s.rstd_2 = own(most, &BlockSaved::rstd_2, f32, {n});
  s.f = own(most, &BlockSaved::f, dtype, {n, shard_.inner});
  s.g = own(all, &BlockSaved::g, dtype, {n, shard_.inner});
  return s;
}

GptBigCode::GptBigCode(Device& device, Mesh& mesh, const ModelConfig& config, SpMode sp_mode, std::int64_t rows,
                       std::int64_t seq_len, DType dtype, Recompute recompute, bool train)
    : dev_(device),
      config_(config),
      shard_(config, mesh.layout.tp, mesh.layout.tp_rank()),
      recompute_(train ? recompute : Recompute::block),
      seq_len_(seq_len),
      local_positions_(local_positions(sp_mode, seq_len, mesh.layout.sp, mesh.layout.sp_rank())),
      tp_(device, *mesh.tp, rows * seq_len / mesh.layout.sp * config.n_embd, dtype),
      sp_(device, *mesh.sp, sp_mode, largest_exchange(config_, shard_, sp_mode, rows * seq_len, mesh.layout.sp), dtype),
      attention_(device, config_, shard_, &sp_, rows, seq_len, dtype, train),
      head_(device, config_, shard_, tp_, rows * seq_len / mesh.layout.sp, dtype, train) {
  check_usage(seq_len >= 1 && seq_len <= config.n_positions, "seq_len ", seq_len,
              " is not between 1 and the model's n_positions ", config.n_positions);
  const auto t = static_cast<std::int64_t>(local_positions_.size());
  const std::int64_t n = rows * t, C = config.n_embd;
  host_ids_.resize(static_cast<std::size_t>(n));
  host_labels_.resize(host_ids_.size());
  const auto upload_rows = [&](const std::vector<std::int32_t>& row) {
    const auto length = static_cast<std::int64_t>(row.size());
    const Tensor all = device.allocate(Kind::batches, DType::int32, {rows, length});
    for (std::int64_t b = 0; b < rows; ++b) device.upload(all.slice(0, b, b + 1), row.data());
    return all;
  };
  ids_ = device.allocate(Kind::batches, DType::int32, {n});
  positions_ = upload_rows(local_positions_);
  query_positions_ = attention_.keeps_projection() ? positions_ : upload_rows(local_positions(sp_mode, seq_len, 1, 0));
  first_ = device.allocate(Kind::batches, DType::int32, {rows, query_positions_.dim(1)});

  for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
    // Without a backward pass one input buffer serves all layers: a block may overwrite what it has read.
    if (!train && layer > 0)
      saved_.push_back(saved_[0]);
    else
      saved_.push_back(allocate_saved(dtype, layer ? &saved_[0] : nullptr));
  }
  x_out_ = train ? device.allocate(Kind::activations, dtype, {n, C}) : saved_[0].x;
  scratch_.y = device.allocate(Kind::workspace, dtype, {n, C});
  if (train) {
    dx_ = device.allocate(Kind::workspace, dtype, {n, C});
    scratch_.dc = device.allocate(Kind::workspace, dtype, {n, C});
    scratch_.dg = device.allocate(Kind::workspace, dtype, {n, shard_.inner});
    scratch_.dqkv = device.allocate(Kind::workspace, dtype, {n, shard_.qkv});
  }
}

Pass GptBigCode::begin(const MicroBatch& batch, bool dropout) {
  const std::int64_t rows = positions_.dim(0), t = positions_.dim(1);
  for (std::int64_t b = 0; b < rows; ++b) {
    for (std::int64_t i = 0; i < t; ++i) {
      const std::int64_t at = b * seq_len_ + local_positions_[static_cast<std::size_t>(i)];
      check(batch.ids[at] >= 0 && batch.ids[at] < config_.vocab_size, "token id ", batch.ids[at], " at position ", at,
            " of the micro-batch is not below vocab_size ", config_.vocab_size);
      host_ids_[static_cast<std::size_t>(b * t + i)] = batch.ids[at];
      host_labels_[static_cast<std::size_t>(b * t + i)] = batch.labels[at];
    }
  }
  dev_.upload(ids_, host_ids_.data());
  head_.set_labels(host_labels_.data(), rows * t);
  return {rows,       t,          positions_,      query_positions_, {first_, query_positions_},
          batch.seed, batch.step, batch.first_row, dropout};
}

Tensor GptBigCode::blocks_forward(const Pass& pass, Weights& weights) {
  const Tensors& embeddings = weights.gather(0, 1);
  Tensor x = saved_[0].x;
  dev_.gather_rows(x, embeddings[0], ids_, shard_.first_id);
  tp_.all_reduce(x);
  dev_.add_positions(x.split_first(pass.rows, pass.seq_len), pass.positions, embeddings[1],
                     pass.drop(config_.embd_pdrop, Site::embedding, 0));
  weights.release(0);
  for (std::size_t layer = 0; layer < saved_.size(); ++layer) {
    const int unit = static_cast<int>(layer) + 1;
    const Tensor out = layer + 1 < saved_.size() ? saved_[layer + 1].x : x_out_;
    block(layer).forward(out, saved_[layer], scratch_, BlockTensors(weights.gather(unit, unit + 1)), pass);
    weights.release(unit);
  }
  return x_out_;
}

void GptBigCode::forward(Tensor loss_sum, Tensor token_loss, const MicroBatch& batch, Weights& weights) {
  const Pass pass = begin(batch, false);
  const Tensor x = blocks_forward(pass, weights);
  const Tensors& ln_f = weights.gather(ln_f_unit(), table_unit());
  head_.loss(loss_sum, token_loss, x, ln_f, weights.gather(table_unit())[0]);
  weights.release(table_unit());
  weights.release(ln_f_unit());
}

void GptBigCode::forward_backward(Tensor loss_sum, const MicroBatch& batch, Weights& weights, Gradients& gradients,
                                  float weight) {
  const Pass pass = begin(batch, true);
  const Tensor x = blocks_forward(pass, weights);

  // The tied table's gradient is opened here, by the head, and closed after the embedding's share has been added.
  const Tensors& ln_f = weights.gather(ln_f_unit(), table_unit());
  const auto dln_f = gradients.open(ln_f_unit());
  const auto dtable = gradients.open(table_unit());
  head_.loss_backward(loss_sum, dx_, x, ln_f, weights.gather(table_unit())[0], dln_f.tensors, dln_f.write,
                      dtable.tensors[0], dtable.write, weight);
  weights.release(table_unit());
  weights.release(ln_f_unit());
  gradients.close(ln_f_unit());
  if (!config_.tie_word_embeddings) gradients.close(table_unit());

  for (std::size_t layer = saved_.size(); layer-- > 0;) {
    const int unit = static_cast<int>(layer) + 1;
    const BlockTensors w(weights.gather(unit, layer > 0 ? unit - 1 : -1));
    const auto opened = gradients.open(unit);
    block(layer).restore(saved_[layer], scratch_, w, pass, recompute_);
    block(layer).backward(dx_, saved_[layer], scratch_, w, BlockTensors(opened.tensors), opened.write, pass);
    weights.release(unit);
    gradients.close(unit);
  }

  const auto dembeddings = gradients.open(0);
  dev_.add_positions_backward(dembeddings.tensors[1], dx_.split_first(pass.rows, pass.seq_len), pass.positions,
                              pass.drop(config_.embd_pdrop, Site::embedding, 0), dembeddings.write);
  dev_.gather_rows_backward(dembeddings.tensors[0], dx_, ids_, shard_.first_id,
                            config_.tie_word_embeddings ? Write::accumulate : dembeddings.write);
  gradients.close(0);
}

}  // namespace onescale

#include "model/gpt_bigcode.h"

#include <numeric>

#include "kernels/error.h"

namespace onescale {

namespace {

// The buffers of one block for n tokens. `kept` allocates those that a recompute mode keeps a layer, `shared` gives the
// others.
BlockSaved allocate_saved(Device& device, const ModelConfig& c, std::int64_t n, DType dtype, Recompute recompute,
                          const BlockSaved* shared) {
  const auto own = [&](bool kept, Tensor BlockSaved::*member, DType type, std::initializer_list<std::int64_t> shape) {
    return kept || !shared ? device.allocate(Kind::activations, type, shape) : shared->*member;
  };
  const bool all = recompute == Recompute::none, most = recompute != Recompute::block;
  const DType f32 = DType::float32;
  BlockSaved s;
  s.x = own(true, &BlockSaved::x, dtype, {n, c.n_embd});
  s.a = own(all, &BlockSaved::a, dtype, {n, c.n_embd});
  s.mean_1 = own(most, &BlockSaved::mean_1, f32, {n});
  s.rstd_1 = own(most, &BlockSaved::rstd_1, f32, {n});
  s.qkv = own(most, &BlockSaved::qkv, dtype, {n, c.qkv_size()});
  s.o = own(most, &BlockSaved::o, dtype, {n, c.n_embd});
  s.lse = own(most, &BlockSaved::lse, f32, {n, c.n_head});
  s.x_mid = own(most, &BlockSaved::x_mid, dtype, {n, c.n_embd});
  s.m = own(all, &BlockSaved::m, dtype, {n, c.n_embd});
  s.mean_2 = own(most, &BlockSaved::mean_2, f32, {n});
  s.rstd_2 = own(most, &BlockSaved::rstd_2, f32, {n});
  s.f = own(most, &BlockSaved::f, dtype, {n, c.n_inner});
  s.g = own(all, &BlockSaved::g, dtype, {n, c.n_inner});
  return s;
}

}  // namespace

GptBigCode::GptBigCode(Device& device, const ModelConfig& config, std::int64_t rows, std::int64_t seq_len, DType dtype,
                       Recompute recompute, bool train)
    : dev_(device),
      config_(config),
      recompute_(train ? recompute : Recompute::block),
      head_(device, config_, rows * seq_len, dtype, train) {
  check_usage(seq_len >= 1 && seq_len <= config.n_positions, "seq_len ", seq_len,
              " is not between 1 and the model's n_positions ", config.n_positions);
  const std::int64_t n = rows * seq_len, C = config.n_embd;
  ids_ = device.allocate(Kind::batches, DType::int32, {n});
  positions_ = device.allocate(Kind::batches, DType::int32, {rows, seq_len});
  first_ = device.allocate(Kind::batches, DType::int32, {rows, seq_len});
  last_ = device.allocate(Kind::batches, DType::int32, {rows, seq_len});
  std::vector<std::int32_t> position(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) position[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % seq_len);
  device.upload(positions_, position.data());
  device.upload(last_, position.data());

  for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
    // Without a backward pass one input buffer serves all layers: a block may overwrite what it has read.
    if (!train && layer > 0)
      saved_.push_back(saved_[0]);
    else
      saved_.push_back(allocate_saved(device, config, n, dtype, recompute_, layer ? &saved_[0] : nullptr));
  }
  x_out_ = train ? device.allocate(Kind::activations, dtype, {n, C}) : saved_[0].x;
  scratch_.y = device.allocate(Kind::workspace, dtype, {n, C});
  if (train) {
    dx_ = device.allocate(Kind::workspace, dtype, {n, C});
    scratch_.dc = device.allocate(Kind::workspace, dtype, {n, C});
    scratch_.dg = device.allocate(Kind::workspace, dtype, {n, config.n_inner});
    scratch_.dqkv = device.allocate(Kind::workspace, dtype, {n, config.qkv_size()});
  }
}

Pass GptBigCode::begin(const MicroBatch& batch, bool dropout) {
  const std::int64_t n = ids_.numel();
  for (std::int64_t i = 0; i < n; ++i) {
    check(batch.ids[i] >= 0 && batch.ids[i] < config_.vocab_size, "token id ", batch.ids[i], " at position ", i,
          " of the micro-batch is not below vocab_size ", config_.vocab_size);
  }
  dev_.upload(ids_, batch.ids);
  head_.set_labels(batch.labels, n);
  return {positions_.dim(0), positions_.dim(1), positions_,      {first_, last_},
          batch.seed,        batch.step,        batch.first_row, dropout};
}

Tensor GptBigCode::blocks_forward(const Pass& pass, Weights& weights) {
  const Tensors& embeddings = weights.gather(0);
  Tensor x = saved_[0].x;
  dev_.gather_rows(x, embeddings[0], ids_, 0);
  dev_.add_positions(x.split_first(pass.rows, pass.seq_len), pass.positions, embeddings[1],
                     pass.drop(config_.embd_pdrop, Site::embedding, 0));
  weights.release(0);
  for (std::size_t layer = 0; layer < saved_.size(); ++layer) {
    const int unit = static_cast<int>(layer) + 1;
    const Tensor out = layer + 1 < saved_.size() ? saved_[layer + 1].x : x_out_;
    Block(dev_, config_, static_cast<std::int64_t>(layer))
        .forward(out, saved_[layer], scratch_, BlockTensors(weights.gather(unit)), pass);
    weights.release(unit);
  }
  return x_out_;
}

void GptBigCode::forward(Tensor loss_sum, Tensor token_loss, const MicroBatch& batch, Weights& weights) {
  const Pass pass = begin(batch, false);
  const Tensor x = blocks_forward(pass, weights);
  const Tensors& ln_f = weights.gather(ln_f_unit());
  head_.loss(loss_sum, token_loss, x, ln_f, weights.gather(table_unit())[0]);
  weights.release(table_unit());
  weights.release(ln_f_unit());
}

void GptBigCode::forward_backward(Tensor loss_sum, const MicroBatch& batch, Weights& weights, Gradients& gradients,
                                  float weight) {
  const Pass pass = begin(batch, true);
  const Tensor x = blocks_forward(pass, weights);

  // The tied table's gradient is opened here, by the head, and closed after the embedding's share has been added.
  const Tensors& ln_f = weights.gather(ln_f_unit());
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
    const Block block(dev_, config_, static_cast<std::int64_t>(layer));
    const BlockTensors w(weights.gather(unit));
    const auto opened = gradients.open(unit);
    block.restore(saved_[layer], scratch_, w, pass, recompute_);
    block.backward(dx_, saved_[layer], scratch_, w, BlockTensors(opened.tensors), opened.write, pass);
    weights.release(unit);
    gradients.close(unit);
  }

  const auto dembeddings = gradients.open(0);
  dev_.add_positions_backward(dembeddings.tensors[1], dx_.split_first(pass.rows, pass.seq_len), pass.positions,
                              pass.drop(config_.embd_pdrop, Site::embedding, 0), dembeddings.write);
  dev_.gather_rows_backward(dembeddings.tensors[0], dx_, ids_, 0,
                            config_.tie_word_embeddings ? Write::accumulate : dembeddings.write);
  gradients.close(0);
}

}  // namespace onescale

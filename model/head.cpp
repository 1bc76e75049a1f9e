#include "model/head.h"

#include <algorithm>

namespace onescale {

Head::Head(Device& device, const ModelConfig& config, const ModelShard& shard, const TensorParallel& tp, std::int64_t n,
           DType dtype, bool train)
    : dev_(device), config_(config), shard_(shard), tp_(tp), chunk_rows_(std::min<std::int64_t>(n, 256)) {
  const std::int64_t C = config.n_embd;
  const auto take = [&](DType type, std::initializer_list<std::int64_t> shape) {
    return device.allocate(Kind::workspace, type, shape);
  };
  labels_ = device.allocate(Kind::batches, DType::int32, {n});
  index_ = device.allocate(Kind::batches, DType::int32, {n});
  x_ = take(DType::float32, {n, C});
  y_ = take(dtype, {n, C});
  mean_ = take(DType::float32, {n});
  rstd_ = take(DType::float32, {n});
  if (train) dy_ = take(dtype, {n, C}), dx_ = dtype == DType::float32 ? y_ : take(DType::float32, {n, C});
  logits_ = take(dtype, {chunk_rows_, shard.vocab});
  stats_ = take(DType::float32, {chunk_rows_, 3});
  losses_ = take(DType::float32, {chunk_rows_});
  if (tp.size() > 1) parts_ = device.allocate(Kind::transient, DType::float32, {tp.size() * chunk_rows_ * 3});
}

void Head::set_labels(const std::vector<std::int32_t>& labels) {
  std::vector<std::int32_t> good, index;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] == -100) continue;
    good.push_back(labels[i]);
    index.push_back(static_cast<std::int32_t>(i));
  }
  good_ = std::ssize(good);
  dev_.upload(chosen(labels_), good.data());
  dev_.upload(chosen(index_), index.data());
}

void Head::release(Weights& weights) const {
  weights.release(table_unit());
  weights.release(ln_f_unit());
}

void Head::normalise(Tensor x, const Tensors& ln_f) {
  dev_.gather_rows(chosen(x_), x, chosen(index_), 0);
  dev_.layernorm(chosen(y_), chosen(mean_), chosen(rstd_), chosen(x_), ln_f[0], ln_f[1], config_.layer_norm_epsilon);
}

Tensor Head::chunk(Tensor loss_sum, Tensor table, std::int64_t begin, std::int64_t end, float weight) {
  const std::int64_t rows = end - begin;
  const Tensor logits = logits_.slice(0, 0, rows), stats = stats_.slice(0, 0, rows), losses = losses_.slice(0, 0, rows);
  const Tensor labels = labels_.slice(0, begin, end);
  dev_.linear(logits, y_.slice(0, begin, end), table, {});
  dev_.softmax_statistics(stats, logits, labels, shard_.first_id, shard_.ids);
  if (tp_.size() > 1) {
    const Tensor parts = parts_.slice(0, 0, tp_.size() * rows * 3).view({tp_.size(), rows, 3});
    std::vector<Tensor> by_rank;
    for (int r = 0; r < tp_.size(); ++r) by_rank.push_back(parts.slice(0, r, r + 1));
    tp_.group().all_gather(by_rank, stats)->wait();
    dev_.combine_statistics(stats, parts);
  }
  dev_.cross_entropy(losses, logits, stats, labels, shard_.first_id, shard_.ids, weight);
  dev_.sum(loss_sum, losses, Write::accumulate);
  return logits;
}

void Head::loss(Tensor loss_sum, Tensor x, Weights& weights) {
  const Tensors& ln_f = weights.gather(ln_f_unit(), table_unit());
  const Tensor table = weights.gather(table_unit())[0];
  if (good_ > 0) normalise(x, ln_f);
  for (std::int64_t begin = 0; begin < good_; begin += chunk_rows_)
    chunk(loss_sum, table, begin, std::min(begin + chunk_rows_, good_), 0);
  release(weights);
}

void Head::loss_backward(Tensor loss_sum, Tensor dx, Tensor x, Weights& weights, Gradients& gradients, float weight) {
  const Tensors& ln_f = weights.gather(ln_f_unit(), table_unit());
  const auto [dln_f, ln_f_write] = gradients.open(ln_f_unit());
  const auto [dtable, table_write] = gradients.open(table_unit());
  const Tensor table = weights.gather(table_unit())[0];
  if (good_ > 0) {
    normalise(x, ln_f);
    for (std::int64_t begin = 0; begin < good_; begin += chunk_rows_) {
      const std::int64_t end = std::min(begin + chunk_rows_, good_);
      const Tensor dlogits = chunk(loss_sum, table, begin, end, weight);
      dev_.linear_backward(dy_.slice(0, begin, end), dtable[0], {}, dlogits, y_.slice(0, begin, end), table,
                           begin == 0 ? table_write : Write::accumulate);
    }
    tp_.all_reduce(chosen(dy_));
    dev_.fill(chosen(dx_), 0);
    dev_.layernorm_backward(chosen(dx_), dln_f[0], dln_f[1], chosen(dy_), chosen(x_), chosen(mean_), chosen(rstd_),
                            ln_f[0], ln_f_write);
    dev_.scatter_rows(dx, chosen(dx_), chosen(index_));
  } else {
    dev_.fill(dx, 0);
    if (table_write == Write::overwrite) dev_.fill(dtable[0], 0);
    for (const Tensor& t : dln_f) {
      if (ln_f_write == Write::overwrite) dev_.fill(t, 0);
    }
  }
  release(weights);
  gradients.close(ln_f_unit());
  if (!config_.tie_word_embeddings) gradients.close(table_unit());
}

void Head::run_empty() {
  const auto like_table = [&](DType type) { return Tensor(nullptr, type, {shard_.vocab, config_.n_embd}); };
  const Tensor table = like_table(y_.dtype), dtable = like_table(DType::float32);
  for (std::int64_t rows = 1; rows <= chunk_rows_; ++rows) {
    const Tensor logits = logits_.slice(0, 0, rows), y = y_.slice(0, 0, rows);
    dev_.linear(logits, y, table, {});
    if (!dy_.empty()) dev_.linear_backward(dy_.slice(0, 0, rows), dtable, {}, logits, y, table, Write::overwrite);
  }
}

void Head::last_logits(Tensor logits, Tensor x, Weights& weights) {
  const auto last = static_cast<std::int32_t>(x.dim(0) - 1);
  good_ = 1;
  dev_.upload(chosen(index_), &last);
  normalise(x, weights.gather(ln_f_unit(), table_unit()));
  std::vector<Tensor> by_rank;
  for (int r = 0; r < tp_.size(); ++r) by_rank.push_back(logits.slice(0, r * shard_.vocab, (r + 1) * shard_.vocab));
  const Tensor mine = by_rank[static_cast<std::size_t>(tp_.rank())];
  dev_.linear(mine.view({1, -1}), chosen(y_), weights.gather(table_unit())[0], {});
  tp_.group().all_gather(by_rank, mine)->wait();
  release(weights);
}

}  // namespace onescale

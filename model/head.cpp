#include "model/head.h"

#include <algorithm>

#include "kernels/error.h"

namespace onescale {

Head::Head(Device& device, const ModelConfig& config, const ModelShard& shard, const TensorParallel& tp, std::int64_t n,
           DType dtype, bool train)
    : dev_(device), config_(config), shard_(shard), tp_(tp), chunk_rows_(std::min<std::int64_t>(n, 256)) {
  const std::int64_t C = config.n_embd;
  labels_ = device.allocate(Kind::batches, DType::int32, {n});
  index_ = device.allocate(Kind::batches, DType::int32, {n});
  x_ = device.allocate(Kind::workspace, dtype, {n, C});
  y_ = device.allocate(Kind::workspace, dtype, {n, C});
  mean_ = device.allocate(Kind::workspace, DType::float32, {n});
  rstd_ = device.allocate(Kind::workspace, DType::float32, {n});
  if (train) dy_ = device.allocate(Kind::workspace, dtype, {n, C});
  logits_ = device.allocate(Kind::workspace, dtype, {chunk_rows_, shard.vocab});
  stats_ = device.allocate(Kind::workspace, DType::float32, {chunk_rows_, 3});
  losses_ = device.allocate(Kind::workspace, DType::float32, {n});
  if (tp.size() > 1) parts_ = device.allocate(Kind::transient, DType::float32, {tp.size() * chunk_rows_ * 3});
}

void Head::set_labels(const std::int32_t* labels, std::int64_t n) {
  host_labels_.clear();
  host_index_.clear();
  for (std::int64_t i = 0; i < n; ++i) {
    if (labels[i] == -100) continue;
    check(labels[i] >= 0 && labels[i] < config_.vocab_size, "label ", labels[i], " of token ", i,
          " is neither -100 (ignored) nor an id below vocab_size ", config_.vocab_size);
    host_labels_.push_back(labels[i]);
    host_index_.push_back(static_cast<std::int32_t>(i));
  }
  good_ = static_cast<std::int64_t>(host_labels_.size());
  dev_.upload(labels_.slice(0, 0, good_), host_labels_.data());
  dev_.upload(index_.slice(0, 0, good_), host_index_.data());
}

void Head::normalise(Tensor x, const Tensors& ln_f) {
  dev_.gather_rows(chosen(x_), x, chosen(index_), 0);
  dev_.layernorm(chosen(y_), chosen(mean_), chosen(rstd_), chosen(x_), ln_f[0], ln_f[1], config_.layer_norm_epsilon);
}

Tensor Head::chunk(Tensor loss_sum, Tensor table, std::int64_t begin, std::int64_t end, float weight) {
  const Tensor logits = logits_.slice(0, 0, end - begin), stats = stats_.slice(0, 0, end - begin);
  const Tensor labels = labels_.slice(0, begin, end), losses = losses_.slice(0, begin, end);
  dev_.linear(logits, y_.slice(0, begin, end), table, {});
  dev_.softmax_statistics(stats, logits, labels, shard_.first_id, shard_.ids);
  if (tp_.size() > 1) {
    const std::int64_t rows = end - begin;
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

void Head::loss(Tensor loss_sum, Tensor token_loss, Tensor x, const Tensors& ln_f, Tensor table) {
  if (good_ > 0) {
    normalise(x, ln_f);
    for (std::int64_t begin = 0; begin < good_; begin += chunk_rows_) {
      chunk(loss_sum, table, begin, std::min(begin + chunk_rows_, good_), 0.0f);
    }
  }
  if (!token_loss.empty()) {
    dev_.scatter_rows(token_loss.view({-1, 1}), chosen(losses_).view({-1, 1}), chosen(index_));
  }
}

void Head::loss_backward(Tensor loss_sum, Tensor dx, Tensor x, const Tensors& ln_f, Tensor table, const Tensors& dln_f,
                         Write ln_f_write, Tensor dtable, Write table_write, float weight) {
  if (good_ == 0) {
    dev_.fill(dx, 0);
    if (table_write == Write::overwrite) dev_.fill(dtable, 0);
    for (const Tensor& t : dln_f) {
      if (ln_f_write == Write::overwrite) dev_.fill(t, 0);
    }
    return;
  }
  normalise(x, ln_f);
  for (std::int64_t begin = 0; begin < good_; begin += chunk_rows_) {
    const std::int64_t end = std::min(begin + chunk_rows_, good_);
    const Tensor dlogits = chunk(loss_sum, table, begin, end, weight);
    dev_.linear_backward(dy_.slice(0, begin, end), dtable, {}, dlogits, y_.slice(0, begin, end), table,
                         begin == 0 ? table_write : Write::accumulate);
  }
  tp_.all_reduce(chosen(dy_));
  // y is no longer needed: it takes the gradient of the normalisation's input.
  const Tensor dx_good = chosen(y_);
  dev_.fill(dx_good, 0);
  dev_.layernorm_backward(dx_good, dln_f[0], dln_f[1], chosen(dy_), chosen(x_), chosen(mean_), chosen(rstd_), ln_f[0],
                          ln_f_write);
  dev_.scatter_rows(dx, dx_good, chosen(index_));
}

void Head::last_logits(Tensor logits, Tensor x, const Tensors& ln_f, Tensor table) {
  const std::int32_t last = static_cast<std::int32_t>(x.dim(0) - 1);
  good_ = 1;
  dev_.upload(chosen(index_), &last);
  normalise(x, ln_f);
  std::vector<Tensor> by_rank;
  for (int r = 0; r < tp_.size(); ++r) by_rank.push_back(logits.slice(0, r * shard_.vocab, (r + 1) * shard_.vocab));
  const Tensor mine = by_rank[static_cast<std::size_t>(tp_.rank())];
  dev_.linear(mine.view({1, -1}), chosen(y_), table, {});
  tp_.group().all_gather(by_rank, mine)->wait();
}

}  // namespace onescale

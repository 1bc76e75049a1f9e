#include "model/attention.h"

namespace onescale {

namespace {

Tensor keys(Tensor kv) {
  return kv.slice(-1, 0, kv.dim(-1) / 2);
}

Tensor values(Tensor kv) {
  return kv.slice(-1, kv.dim(-1) / 2, kv.dim(-1));
}

}  // namespace

Attention::Attention(Device& device, const ModelConfig& config, const ModelShard& shard, SequenceParallel& sp,
                     std::int64_t rows, std::int64_t seq_len, DType dtype, bool train)
    : dev_(device),
      config_(config),
      shard_(shard),
      sp_(sp),
      rows_(rows),
      seq_len_(seq_len),
      by_heads_(sp.size() > 1 && sp.mode() == SpMode::ulysses),
      dtype_(dtype) {
  if (sp.size() == 1) return;
  const std::int64_t d = config.head_size(), h = shard.heads / sp.size();
  const auto take = [&](std::int64_t heads, std::int64_t width) {
    return device.allocate(Kind::workspace, dtype, {rows, seq_len, heads, width});
  };
  const bool gathers = !by_heads_ || config.multi_query;
  if (gathers) kv_ = take(shard.kv_heads, 2 * d);
  if (!train) return;
  dkv_ = take(gathers ? shard.kv_heads : h, 2 * d);
  if (by_heads_) do_heads_ = take(h, d), dq_heads_ = take(h, d);
}

AttentionSaved Attention::allocate() const {
  const std::int64_t sp = sp_.size(), d = config_.head_size(), t = seq_len_ / sp, h = shard_.heads / sp;
  const auto take = [&](DType type, std::initializer_list<std::int64_t> shape) {
    return dev_.allocate(Kind::activations, type, shape);
  };
  AttentionSaved s;
  s.o = take(dtype_, {rows_ * t, shard_.width});
  s.lse = take(DType::float32, {rows_ * t, shard_.heads});
  if (!by_heads_) return s;
  s.q = take(dtype_, {rows_, seq_len_, h, d});
  s.o_heads = take(dtype_, {rows_, seq_len_, h, d});
  s.kv = config_.multi_query ? take(dtype_, {rows_, t, 1, 2 * d}) : take(dtype_, {rows_, seq_len_, h, 2 * d});
  return s;
}

std::pair<Tensor, Tensor> Attention::heads(Tensor qkv, const Pass& pass) const {
  const std::int64_t d = config_.head_size();
  const Tensor tokens = pass.by_row(qkv);
  if (config_.multi_query) {
    return {tokens.slice(-1, 0, shard_.width).split_last(shard_.heads, d),
            tokens.slice(-1, shard_.width, shard_.qkv).split_last(1, 2 * d)};
  }
  const Tensor each = tokens.split_last(shard_.heads, 3 * d);
  return {each.slice(-1, 0, d), each.slice(-1, d, 3 * d)};
}

Dropout Attention::dropout(const Pass& pass, std::int64_t layer) const {
  Dropout dropout = pass.drop(config_.attn_pdrop, Site::attention, layer);
  dropout.positions = pass.visible.last;
  dropout.first_head = shard_.first_head + (by_heads_ ? sp_.rank() * shard_.heads / sp_.size() : 0);
  return dropout;
}

Tensor Attention::all_kv(Tensor kv, std::int64_t layer) {
  if (kv_.empty()) return kv;
  if (held_ != layer) sp_.gather(kv_, kv);
  held_ = layer;
  return kv_;
}

void Attention::forward(const AttentionSaved& s, Tensor qkv, const Pass& pass, std::int64_t layer, KvCache* cache) {
  held_ = -1;
  const auto [q, kv] = heads(qkv, pass);
  const auto attend = [&](Tensor o, Tensor queries, Tensor all) {
    const Tensor lse = s.lse.view({o.dim(0), o.dim(1), o.dim(2)});
    dev_.attention(o, lse, queries, keys(all), values(all), shard_.attention_scale, pass.visible, dropout(pass, layer));
  };
  const Tensor o = pass.by_row(s.o).split_last(shard_.heads, config_.head_size());
  if (cache) {
    const std::int64_t end = cache->length + o.dim(1);
    dev_.copy(cache->kv.slice(1, cache->length, end), kv);
    cache->length = end;
    attend(o, q, cache->kv.slice(1, 0, end));
  } else if (by_heads_) {
    sp_.to_heads(s.q, q);
    if (config_.multi_query)
      dev_.copy(s.kv, kv);
    else
      sp_.to_heads(s.kv, kv);
    attend(s.o_heads, s.q, all_kv(s.kv, layer));
    sp_.to_tokens(o, s.o_heads);
  } else {
    attend(o, q, all_kv(kv, layer));
  }
}

void Attention::backward(Tensor dqkv, Tensor do_, const AttentionSaved& s, Tensor qkv, const Pass& pass,
                         std::int64_t layer) {
  const auto [dq, dkv] = heads(dqkv, pass);
  const auto by_head = [&](Tensor t) { return pass.by_row(t).split_last(shard_.heads, config_.head_size()); };
  const auto attend = [&](Tensor dqueries, Tensor dall, Tensor dout, Tensor o, Tensor queries, Tensor all) {
    const Tensor lse = s.lse.view({o.dim(0), o.dim(1), o.dim(2)});
    dev_.attention_backward(dqueries, keys(dall), values(dall), dout, o, lse, queries, keys(all), values(all),
                            shard_.attention_scale, pass.visible, dropout(pass, layer));
  };
  if (by_heads_) {
    sp_.to_heads(do_heads_, by_head(do_));
    attend(dq_heads_, dkv_, do_heads_, s.o_heads, s.q, all_kv(s.kv, layer));
    sp_.to_tokens(dq, dq_heads_);
    if (config_.multi_query)
      sp_.reduce(dkv, dkv_);
    else
      sp_.to_tokens(dkv, dkv_);
  } else {
    const auto [q, kv] = heads(qkv, pass);
    attend(dq, dkv_.empty() ? dkv : dkv_, by_head(do_), by_head(s.o), q, all_kv(kv, layer));
    if (!dkv_.empty()) sp_.reduce(dkv, dkv_);
  }
}

}  // namespace onescale

#include "model/decoder.h"

#include <algorithm>
#include <numeric>

namespace onescale {

Decoder::Decoder(GptBigCode& model, std::int64_t capacity) : model_(model) {
  const auto take = [&](DType type, std::initializer_list<std::int64_t> shape) {
    return model.dev_.allocate(Kind::activations, type, shape);
  };
  const DType dtype = model.scratch_.y.dtype;
  for (std::int64_t layer = 0; layer < model.config_.n_layer; ++layer)
    caches_.push_back({take(dtype, {1, capacity, model.shard_.kv_heads, 2 * model.config_.head_size()})});
  ids_ = take(DType::int32, {std::min<std::int64_t>(model.ids_.numel(), 128)});  // that are processed together
  positions_ = take(DType::int32, {capacity});
  first_ = take(DType::int32, {capacity});
  std::vector<std::int32_t> position(static_cast<std::size_t>(capacity));
  std::iota(position.begin(), position.end(), 0);
  model.dev_.upload(positions_, position.data());
  const std::int64_t ids = model.shard_.vocab * model.tp_.size();
  logits_ = take(dtype, {ids});
  float_logits_ = dtype == DType::float32 ? logits_ : take(DType::float32, {ids});
  host_logits_.resize(static_cast<std::size_t>(model.config_.vocab_size));
}

void Decoder::reset() {
  for (KvCache& cache : caches_) cache.length = 0;
}

const std::vector<float>& Decoder::append(std::span<const std::int32_t> ids, Weights& weights) {
  Device& dev = model_.dev_;
  Tensor x;
  while (!ids.empty()) {
    const std::int64_t n = std::min(ids_.numel(), std::ssize(ids)), begin = length();
    const auto of_tokens = [&](Tensor t) { return t.slice(0, begin, begin + n).view({1, n}); };
    const Tensor some = ids_.slice(0, 0, n);
    dev.upload(some, ids.data());
    Pass pass;
    pass.positions = of_tokens(positions_);
    pass.visible = {of_tokens(first_), pass.positions};
    x = model_.hidden(some, pass, weights, caches_);
    ids = ids.subspan(static_cast<std::size_t>(n));
  }
  model_.head_.last_logits(logits_, x, weights);
  if (float_logits_.data != logits_.data) dev.copy(float_logits_, logits_);
  // All ranks draw the same token.
  model_.mesh_.world.broadcast(float_logits_, 0)->wait();
  dev.download(host_logits_.data(), float_logits_.slice(0, 0, model_.config_.vocab_size));
  return host_logits_;
}

}  // namespace onescale

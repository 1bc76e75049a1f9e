#include "model/decoder.h"

#include <algorithm>

#include "kernels/error.h"

namespace onescale {

namespace {
constexpr std::int64_t prompt_chunk = 128;  // tokens of a prompt that are processed together

BlockSaved rows_of(BlockSaved s, std::int64_t n) {
  for (Tensor* t : {&s.x, &s.a, &s.mean_1, &s.rstd_1, &s.qkv, &s.attention.o, &s.attention.lse, &s.x_mid, &s.m,
                    &s.mean_2, &s.rstd_2, &s.f, &s.g}) {
    *t = t->slice(0, 0, n);
  }
  return s;
}
}  // namespace

Decoder::Decoder(Device& device, Mesh& mesh, const ModelConfig& config, std::int64_t capacity, DType dtype)
    : dev_(device),
      world_(mesh.world),
      config_(config),
      shard_(config, mesh.layout.tp, mesh.layout.tp_rank()),
      tp_(device, *mesh.tp, std::min(capacity, prompt_chunk) * config.n_embd, dtype),
      attention_(device, config_, shard_, nullptr, 1, std::min(capacity, prompt_chunk), dtype, false),
      head_(device, config_, shard_, tp_, 1, dtype, false) {
  check_usage(capacity <= config.n_positions, "prompt and new tokens together are ", capacity,
              ", more than the model's n_positions ", config.n_positions, "; shorten one of them");
  const auto take = [&](DType type, std::initializer_list<std::int64_t> shape) {
    return device.allocate(Kind::activations, type, shape);
  };
  const std::int64_t n = std::min(capacity, prompt_chunk), C = config.n_embd;
  const DType f32 = DType::float32;
  for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
    caches_.push_back({take(dtype, {1, capacity, shard_.kv_heads, 2 * config.head_size()}), 0});
  }
  ids_ = take(DType::int32, {n});
  positions_ = take(DType::int32, {1, n});
  first_ = take(DType::int32, {1, n});
  last_ = take(DType::int32, {1, n});
  saved_.x = take(dtype, {n, C});
  saved_.a = saved_.m = take(dtype, {n, C});
  saved_.mean_1 = saved_.mean_2 = take(f32, {n});
  saved_.rstd_1 = saved_.rstd_2 = take(f32, {n});
  saved_.qkv = take(dtype, {n, shard_.qkv});
  saved_.attention = attention_.allocate(true, nullptr);
  saved_.x_mid = take(dtype, {n, C});
  saved_.f = saved_.g = take(dtype, {n, shard_.inner});
  scratch_.y = take(dtype, {n, C});
  const std::int64_t ids = shard_.vocab * tp_.size();
  logits_ = take(dtype, {ids});
  float_logits_ = dtype == f32 ? logits_ : take(f32, {ids});
  host_logits_.resize(static_cast<std::size_t>(config.vocab_size));
}

void Decoder::reset() {
  for (KvCache& cache : caches_) cache.length = 0;
}

const std::vector<float>& Decoder::append(std::span<const std::int32_t> ids, Weights& weights) {
  check(!ids.empty(), "the prompt is empty; give at least one token");
  check(length() + static_cast<std::int64_t>(ids.size()) <= capacity(), "the sequence would be longer than ",
        capacity(), " tokens");
  for (std::size_t begin = 0; begin < ids.size(); begin += prompt_chunk) {
    const std::size_t end = std::min(begin + prompt_chunk, ids.size());
    pass(ids.subspan(begin, end - begin), weights, end == ids.size());
  }
  return host_logits_;
}

void Decoder::pass(std::span<const std::int32_t> ids, Weights& weights, bool last) {
  const auto n = static_cast<std::int64_t>(ids.size());
  const std::int64_t before = length();
  std::vector<std::int32_t> position(ids.size()), zero(ids.size(), 0);
  for (std::size_t i = 0; i < ids.size(); ++i)
    position[i] = static_cast<std::int32_t>(before + static_cast<std::int64_t>(i));
  const auto upload = [&](Tensor t, const std::int32_t* values) {
    const Tensor used = t.slice(-1, 0, n);
    dev_.upload(used, values);
    return used;
  };
  const Tensor token_ids = upload(ids_, ids.data());
  Pass pass;
  pass.rows = 1;
  pass.seq_len = n;
  pass.positions = pass.query_positions = upload(positions_, position.data());
  pass.visible = {upload(first_, zero.data()), upload(last_, position.data())};

  BlockSaved s = rows_of(saved_, n);
  BlockScratch scratch;
  scratch.y = scratch_.y.slice(0, 0, n);
  const Tensors& embeddings = weights.gather(0, 1);
  dev_.gather_rows(s.x, embeddings[0], token_ids, shard_.first_id);
  tp_.all_reduce(s.x);
  dev_.add_positions(s.x.split_first(1, n), pass.positions, embeddings[1], pass.drop(0, Site::embedding, 0));
  weights.release(0);
  for (std::size_t layer = 0; layer < caches_.size(); ++layer) {
    const int unit = static_cast<int>(layer) + 1;
    const BlockTensors w(weights.gather(unit, unit + 1));
    Block(dev_, config_, attention_, tp_, static_cast<std::int64_t>(layer))
        .forward(s.x, s, scratch, w, pass, &caches_[layer]);
    weights.release(unit);
  }
  if (!last) return;
  const int ln_f_unit = static_cast<int>(config_.n_layer) + 1;
  const int table_unit = config_.tie_word_embeddings ? 0 : ln_f_unit + 1;
  const Tensors& ln_f = weights.gather(ln_f_unit);
  head_.last_logits(logits_, s.x, ln_f, weights.gather(table_unit)[0]);
  weights.release(table_unit);
  weights.release(ln_f_unit);
  if (float_logits_.data != logits_.data) dev_.copy(float_logits_, logits_);
  // All ranks draw the same token.
  world_.broadcast(float_logits_, 0)->wait();
  dev_.download(host_logits_.data(), float_logits_.slice(0, 0, config_.vocab_size));
}

}  // namespace onescale

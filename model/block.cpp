#include "model/block.h"

#include <cmath>

#include "kernels/error.h"

namespace onescale {

BlockTensors::BlockTensors(const Tensors& t)
    : ln_1{t.at(0), t.at(1)},
      c_attn{t.at(2), t.at(3)},
      attn_c_proj{t.at(4), t.at(5)},
      ln_2{t.at(6), t.at(7)},
      c_fc{t.at(8), t.at(9)},
      mlp_c_proj{t.at(10), t.at(11)} {}

float Block::scale() const {
  return config_.scale_attn_weights ? static_cast<float>(1 / std::sqrt(static_cast<double>(config_.head_size())))
                                    : 1.0f;
}

// One K/V head: a token's row is [Q: h heads of d | K | V]. One per head: the rows are interleaved, [q_0 k_0 v_0 | q_1
// k_1 v_1 | ...].
Block::Heads Block::heads(Tensor qkv, const Pass& pass) const {
  const std::int64_t h = config_.n_head, d = config_.head_size(), C = config_.n_embd;
  const Tensor rows = qkv.split_first(pass.rows, pass.seq_len);
  if (config_.multi_query) {
    return {rows.slice(-1, 0, C).split_last(h, d), rows.slice(-1, C, C + d).split_last(1, d),
            rows.slice(-1, C + d, C + 2 * d).split_last(1, d)};
  }
  const Tensor each = rows.split_last(h, 3 * d);
  return {each.slice(-1, 0, d), each.slice(-1, d, 2 * d), each.slice(-1, 2 * d, 3 * d)};
}

void Block::attend(BlockSaved& s, const BlockScratch& scratch, const BlockTensors& w, const Pass& pass,
                   KvCache* cache) const {
  dev_.layernorm(s.a, s.mean_1, s.rstd_1, s.x, w.ln_1.weight, w.ln_1.bias, config_.layer_norm_epsilon);
  dev_.linear(s.qkv, s.a, w.c_attn.weight, w.c_attn.bias);
  auto [q, k, v] = heads(s.qkv, pass);
  if (cache) {
    const std::int64_t end = cache->length + pass.seq_len;
    dev_.copy(cache->k.slice(1, cache->length, end), k);
    dev_.copy(cache->v.slice(1, cache->length, end), v);
    k = cache->k.slice(1, 0, end);
    v = cache->v.slice(1, 0, end);
    cache->length = end;
  }
  const Tensor o = s.o.split_first(pass.rows, pass.seq_len).split_last(config_.n_head, config_.head_size());
  dev_.attention(o, s.lse.split_first(pass.rows, pass.seq_len), q, k, v, scale(), pass.visible,
                 pass.drop(config_.attn_pdrop, Site::attention, layer_));
  dev_.linear(scratch.y, s.o, w.attn_c_proj.weight, {});
  const auto by_row = [&](Tensor t) { return t.split_first(pass.rows, pass.seq_len); };
  dev_.residual_layernorm(by_row(s.x_mid), by_row(s.m), s.mean_2, s.rstd_2, by_row(s.x), by_row(scratch.y),
                          w.attn_c_proj.bias, w.ln_2.weight, w.ln_2.bias, config_.layer_norm_epsilon,
                          pass.drop(config_.resid_pdrop, Site::attention_output, layer_));
}

void Block::forward(Tensor x_out, BlockSaved& s, const BlockScratch& scratch, const BlockTensors& w, const Pass& pass,
                    KvCache* cache) const {
  attend(s, scratch, w, pass, cache);
  dev_.linear(s.f, s.m, w.c_fc.weight, w.c_fc.bias);
  dev_.gelu(s.g, s.f, config_.gelu);
  dev_.linear(scratch.y, s.g, w.mlp_c_proj.weight, {});
  const auto by_row = [&](Tensor t) { return t.split_first(pass.rows, pass.seq_len); };
  dev_.residual(by_row(x_out), by_row(s.x_mid), by_row(scratch.y), w.mlp_c_proj.bias,
                pass.drop(config_.resid_pdrop, Site::mlp_output, layer_));
}

void Block::restore(BlockSaved& s, const BlockScratch& scratch, const BlockTensors& w, const Pass& pass,
                    Recompute recompute) const {
  if (recompute == Recompute::block) {
    attend(s, scratch, w, pass, nullptr);
    dev_.linear(s.f, s.m, w.c_fc.weight, w.c_fc.bias);
  } else if (recompute == Recompute::light) {
    dev_.layernorm(s.a, s.mean_1, s.rstd_1, s.x, w.ln_1.weight, w.ln_1.bias, config_.layer_norm_epsilon);
    dev_.layernorm(s.m, s.mean_2, s.rstd_2, s.x_mid, w.ln_2.weight, w.ln_2.bias, config_.layer_norm_epsilon);
  }
  if (recompute != Recompute::none) dev_.gelu(s.g, s.f, config_.gelu);
}

void Block::backward(Tensor dx, const BlockSaved& s, const BlockScratch& scratch, const BlockTensors& w,
                     const BlockTensors& dw, Write write, const Pass& pass) const {
  const auto by_row = [&](Tensor t) { return t.split_first(pass.rows, pass.seq_len); };
  const Tensor dy = scratch.y, dc = scratch.dc;

  dev_.residual_backward(by_row(dy), dw.mlp_c_proj.bias, by_row(dx),
                         pass.drop(config_.resid_pdrop, Site::mlp_output, layer_), write);
  dev_.linear_backward(scratch.dg, dw.mlp_c_proj.weight, {}, dy, s.g, w.mlp_c_proj.weight, write);
  dev_.gelu_backward(scratch.dg, dw.c_fc.bias, s.f, config_.gelu, write);
  dev_.linear_backward(dc, dw.c_fc.weight, {}, scratch.dg, s.m, w.c_fc.weight, write);
  dev_.layernorm_backward(dx, dw.ln_2.weight, dw.ln_2.bias, dc, s.x_mid, s.mean_2, s.rstd_2, w.ln_2.weight, write);

  dev_.residual_backward(by_row(dy), dw.attn_c_proj.bias, by_row(dx),
                         pass.drop(config_.resid_pdrop, Site::attention_output, layer_), write);
  dev_.linear_backward(dc, dw.attn_c_proj.weight, {}, dy, s.o, w.attn_c_proj.weight, write);
  const auto [q, k, v] = heads(s.qkv, pass);
  const auto [dq, dk, dv] = heads(scratch.dqkv, pass);
  const auto by_head = [&](Tensor t) { return by_row(t).split_last(config_.n_head, config_.head_size()); };
  dev_.attention_backward(dq, dk, dv, by_head(dc), by_head(s.o), by_row(s.lse), q, k, v, scale(), pass.visible,
                          pass.drop(config_.attn_pdrop, Site::attention, layer_));
  dev_.linear_backward(dc, dw.c_attn.weight, dw.c_attn.bias, scratch.dqkv, s.a, w.c_attn.weight, write);
  dev_.layernorm_backward(dx, dw.ln_1.weight, dw.ln_1.bias, dc, s.x, s.mean_1, s.rstd_1, w.ln_1.weight, write);
}

}  // namespace onescale

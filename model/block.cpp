#include "model/block.h"

namespace onescale {

BlockTensors::BlockTensors(const Tensors& t)
    : ln_1{t.at(0), t.at(1)},
      c_attn{t.at(2), t.at(3)},
      attn_c_proj{t.at(4), t.at(5)},
      ln_2{t.at(6), t.at(7)},
      c_fc{t.at(8), t.at(9)},
      mlp_c_proj{t.at(10), t.at(11)} {}

BlockSaved BlockSaved::first(std::int64_t n) const {
  BlockSaved s = *this;
  for (Tensor* t : {&s.x, &s.a, &s.mean_1, &s.rstd_1, &s.qkv, &s.attention.o, &s.attention.lse, &s.x_mid, &s.m,
                    &s.mean_2, &s.rstd_2, &s.f, &s.g}) {
    *t = t->slice(0, 0, n);
  }
  return s;
}

void Block::attend(const BlockSaved& s, KvCache* cache) const {
  dev.layernorm(s.a, s.mean_1, s.rstd_1, s.x, w.ln_1.weight, w.ln_1.bias, config.layer_norm_epsilon);
  dev.linear(s.qkv, s.a, w.c_attn.weight, w.c_attn.bias);
  attention.forward(s.attention, s.qkv, pass, layer, cache);
  dev.linear(scratch.y, s.attention.o, w.attn_c_proj.weight, {});
  tp.all_reduce(scratch.y);
  dev.residual_layernorm(pass.by_row(s.x_mid), pass.by_row(s.m), s.mean_2, s.rstd_2, pass.by_row(s.x),
                         pass.by_row(scratch.y), w.attn_c_proj.bias, w.ln_2.weight, w.ln_2.bias,
                         config.layer_norm_epsilon, pass.drop(config.resid_pdrop, Site::attention_output, layer));
}

void Block::forward(Tensor x_out, const BlockSaved& s, KvCache* cache) const {
  attend(s, cache);
  dev.linear(s.f, s.m, w.c_fc.weight, w.c_fc.bias);
  dev.gelu(s.g, s.f, config.gelu);
  dev.linear(scratch.y, s.g, w.mlp_c_proj.weight, {});
  tp.all_reduce(scratch.y);
  dev.residual(pass.by_row(x_out), pass.by_row(s.x_mid), pass.by_row(scratch.y), w.mlp_c_proj.bias,
               pass.drop(config.resid_pdrop, Site::mlp_output, layer));
}

void Block::restore(const BlockSaved& s, Recompute recompute) const {
  if (recompute == Recompute::block) {
    attend(s, nullptr);
    dev.linear(s.f, s.m, w.c_fc.weight, w.c_fc.bias);
  } else if (recompute == Recompute::light) {
    dev.layernorm(s.a, s.mean_1, s.rstd_1, s.x, w.ln_1.weight, w.ln_1.bias, config.layer_norm_epsilon);
    dev.layernorm(s.m, s.mean_2, s.rstd_2, s.x_mid, w.ln_2.weight, w.ln_2.bias, config.layer_norm_epsilon);
  }
  if (recompute != Recompute::none) dev.gelu(s.g, s.f, config.gelu);
}

void Block::backward(Tensor dx, const BlockSaved& s, const BlockTensors& dw, Write write) const {
  const Tensor dy = scratch.y, dc = scratch.dc;

  dev.residual_backward(pass.by_row(dy), dw.mlp_c_proj.bias, pass.by_row(dx),
                        pass.drop(config.resid_pdrop, Site::mlp_output, layer), write);
  dev.linear_backward(scratch.dg, dw.mlp_c_proj.weight, {}, dy, s.g, w.mlp_c_proj.weight, write);
  dev.gelu_backward(scratch.dg, dw.c_fc.bias, s.f, config.gelu, write);
  dev.linear_backward(dc, dw.c_fc.weight, {}, scratch.dg, s.m, w.c_fc.weight, write);
  tp.all_reduce(dc);
  dev.layernorm_backward(dx, dw.ln_2.weight, dw.ln_2.bias, dc, s.x_mid, s.mean_2, s.rstd_2, w.ln_2.weight, write);

  dev.residual_backward(pass.by_row(dy), dw.attn_c_proj.bias, pass.by_row(dx),
                        pass.drop(config.resid_pdrop, Site::attention_output, layer), write);
  // The heads of this tp rank are narrower than C: their gradient takes the start of dc.
  const std::int64_t n = dc.dim(0), width = s.attention.o.dim(1);
  const Tensor d_o = dc.view({-1}).slice(0, 0, n * width).view({n, width});
  dev.linear_backward(d_o, dw.attn_c_proj.weight, {}, dy, s.attention.o, w.attn_c_proj.weight, write);
  attention.backward(scratch.dqkv, d_o, s.attention, s.qkv, pass, layer);
  // The K and V part of dqkv is of this tp rank's heads alone: one sum completes the gradient of both Q and K/V inputs.
  dev.linear_backward(dc, dw.c_attn.weight, dw.c_attn.bias, scratch.dqkv, s.a, w.c_attn.weight, write);
  tp.all_reduce(dc);
  dev.layernorm_backward(dx, dw.ln_1.weight, dw.ln_1.bias, dc, s.x, s.mean_1, s.rstd_1, w.ln_1.weight, write);
}

}  // namespace onescale

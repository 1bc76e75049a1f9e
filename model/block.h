// One transformer block (Radford et al. 2019, pre-LayerNorm; multi-query attention of Shazeer 2019), forward and
// backward.
#pragma once

#include "model/attention.h"
#include "parallel/tensor_parallel.h"
#include "parallel/units.h"

namespace onescale {

// The tensors of a block's unit by name, weights or their gradients.
struct BlockTensors {
  explicit BlockTensors(const Tensors& unit);

  struct Pair {
    Tensor weight, bias;
  };
  Pair ln_1, c_attn, attn_c_proj, ln_2, c_fc, mlp_c_proj;
};

// What the forward pass leaves for the backward pass. n tokens of this rank, C n_embd; I inner and Q qkv of this tp
// rank.
struct BlockSaved {
  Tensor x;               // float32 [n, C] the block's input
  Tensor a;               // [n, C] ln_1(x)
  Tensor mean_1, rstd_1;  // float32 [n]
  Tensor qkv;             // [n, Q]
  AttentionSaved attention;
  Tensor x_mid;           // float32 [n, C] x + attention
  Tensor m;               // [n, C] ln_2(x_mid)
  Tensor mean_2, rstd_2;  // float32 [n]
  Tensor f, g;            // [n, I] before and after GELU

  // Of the first n tokens alone, which are no share of sequence-parallel ranks.
  BlockSaved first(std::int64_t n) const;
};

// What is recomputed in the backward pass instead of being kept: nothing; LayerNorm outputs and GELU; or the whole
// block. The gradients have the same bits in all three.
enum class Recompute : std::uint8_t { none, light, block };

// Buffers that every block uses in turn. y [n, C] receives both projections; the others hold gradients in the backward
// pass.
struct BlockScratch {
  Tensor y;     // [n, C]
  Tensor dc;    // [n, C]
  Tensor dg;    // [n, I]
  Tensor dqkv;  // [n, Q]
};

struct Block {
  Device& dev;
  const ModelConfig& config;
  Attention& attention;
  const TensorParallel& tp;
  const BlockScratch& scratch;
  const Pass& pass;
  std::int64_t layer;
  BlockTensors w;

  // x_out float32 [n, C] = block(s.x); fills the rest of s. With a cache, attends over it and over the pass's own
  // tokens, which are appended.
  void forward(Tensor x_out, const BlockSaved& s, KvCache* cache = nullptr) const;
  // Recomputes what `recompute` did not keep, from what it did.
  void restore(const BlockSaved& s, Recompute recompute) const;
  // dx float32 [n, C]: gradient of the block's output on entry, of its input on return. Writes or adds to every tensor
  // of dw.
  void backward(Tensor dx, const BlockSaved& s, const BlockTensors& dw, Write write) const;

 private:
  void attend(const BlockSaved& s, KvCache* cache) const;
};

}  // namespace onescale

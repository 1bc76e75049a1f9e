// Sequence parallelism: each rank of sp holds a share of every row's tokens, attention needs more than that.
//
// ulysses (Jacobs et al. 2023): attention sees all tokens and a share of the heads; Q and O, and K and V where there is
// one per head, change hands by all-to-all; a single K/V head is gathered by everyone and its gradients are added up.
// gather_kv: attention sees the rank's own queries with all heads and every key; only K and V travel. Rank r holds
// chunks r and 2 * sp - 1 - r of 2 * sp, so that each has the same number of visible pairs.
#pragma once

#include "kernels/device.h"
#include "parallel/communicator.h"

namespace onescale {

enum class SpMode : std::uint8_t { ulysses, gather_kv };

// Global positions of the tokens that rank `rank` of `sp` holds of a row of seq_len, in their local order. Throws
// UsageError where seq_len does not divide.
std::vector<std::int32_t> local_positions(SpMode mode, std::int64_t seq_len, int sp, int rank);

// Moves attention's tensors. [B, T, h, d] activations with the last axis contiguous, any other strides; "local" tensors
// hold this rank's tokens, T / sp; full ones all tokens in global order. Everything is waited for.
class SequenceParallel {
 public:
  // Takes staging for the largest tensor, of `numel` local elements with all heads.
  SequenceParallel(Device& device, Communicator& sp, SpMode mode, std::int64_t numel, DType dtype);

  int size() const { return sp_.size(); }
  int rank() const { return sp_.rank(); }
  SpMode mode() const { return mode_; }

  // by_head [B, T, h / sp, d] = all tokens of this rank's heads, from local [B, T / sp, h, d] with all heads; and back.
  void to_heads(Tensor by_head, Tensor local);
  void to_tokens(Tensor local, Tensor by_head);
  // full [B, T, h, d] = every rank's local tokens.
  void gather(Tensor full, Tensor local);
  // local = the sum over ranks, in rank order and float32, of their full's share for this rank's tokens.
  void reduce(Tensor local, Tensor full);

 private:
  // By rank, its [B, T / sp, heads, d] of staging; the other sizes are those of `like`.
  std::vector<Tensor> pieces(Tensor staging, Tensor like, std::int64_t heads) const;
  // copy(part of full, part of a piece) for the tokens of every rank.
  template <class Copy>
  void each_chunk(Tensor full, const std::vector<Tensor>& pieces, Copy copy) const;

  Device& dev_;
  Communicator& sp_;
  SpMode mode_;
  Tensor send_, receive_;
};

}  // namespace onescale

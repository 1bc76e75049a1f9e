#include "parallel/sequence.h"

#include "kernels/error.h"
#include "parallel/layout.h"

namespace onescale {

namespace {

// A row is cut into equal chunks of tokens; those that rank `rank` of `sp` holds, in their local order.
std::vector<int> chunks_of(SpMode mode, int sp, int rank) {
  if (mode == SpMode::ulysses || sp == 1) return {rank};
  return {rank, 2 * sp - 1 - rank};
}

}  // namespace

std::vector<std::int32_t> local_positions(SpMode mode, std::int64_t seq_len, int sp, int rank) {
  const std::vector<int> chunks = chunks_of(mode, sp, rank);
  const std::int64_t parts = std::ssize(chunks) * sp, length = seq_len / parts;
  check_usage(seq_len % parts == 0, "seq_len ", seq_len, " does not divide by ", parts, ", which sp ", sp,
              parts == sp ? " needs" : " with sp_mode gather_kv needs (2 * sp)", "; the nearest below is ",
              seq_len - seq_len % parts);
  std::vector<std::int32_t> positions;
  for (const int chunk : chunks) {
    for (std::int64_t i = 0; i < length; ++i) positions.push_back(static_cast<std::int32_t>(chunk * length + i));
  }
  return positions;
}

SequenceParallel::SequenceParallel(Device& device, Communicator& sp, SpMode mode, std::int64_t numel, DType dtype)
    : dev_(device), sp_(sp), mode_(mode) {
  if (sp.size() == 1) return;
  send_ = device.allocate(Kind::transient, dtype, {numel});
  receive_ = device.allocate(Kind::transient, dtype, {numel});
}

std::vector<Tensor> SequenceParallel::pieces(Tensor staging, Tensor like, std::int64_t heads) const {
  const std::int64_t B = like.dim(0), t = like.dim(1), d = like.dim(3), n = B * t * heads * d;
  std::vector<Tensor> list;
  for (int r = 0; r < sp_.size(); ++r) list.push_back(staging.slice(0, r * n, (r + 1) * n).view({B, t, heads, d}));
  return list;
}

template <class Copy>
void SequenceParallel::each_chunk(Tensor full, const std::vector<Tensor>& pieces, Copy copy) const {
  for (int r = 0; r < sp_.size(); ++r) {
    const std::vector<int> chunks = chunks_of(mode_, sp_.size(), r);
    const std::int64_t length = pieces[index(r)].dim(1) / std::ssize(chunks);
    for (std::int64_t i = 0; i < std::ssize(chunks); ++i) {
      const std::int64_t global = chunks[index(i)] * length;
      copy(full.slice(1, global, global + length), pieces[index(r)].slice(1, i * length, (i + 1) * length));
    }
  }
}

void SequenceParallel::to_heads(Tensor by_head, Tensor local) {
  const std::int64_t h = by_head.dim(2);
  const std::vector<Tensor> out = pieces(send_, local, h), in = pieces(receive_, local, h);
  for (int r = 0; r < sp_.size(); ++r) dev_.copy(out[index(r)], local.slice(2, r * h, (r + 1) * h));
  sp_.all_to_all(in, out)->wait();
  each_chunk(by_head, in, [&](Tensor tokens, Tensor part) { dev_.copy(tokens, part); });
}

void SequenceParallel::to_tokens(Tensor local, Tensor by_head) {
  const std::int64_t h = by_head.dim(2);
  const std::vector<Tensor> out = pieces(send_, local, h), in = pieces(receive_, local, h);
  each_chunk(by_head, out, [&](Tensor tokens, Tensor part) { dev_.copy(part, tokens); });
  sp_.all_to_all(in, out)->wait();
  for (int r = 0; r < sp_.size(); ++r) dev_.copy(local.slice(2, r * h, (r + 1) * h), in[index(r)]);
}

void SequenceParallel::gather(Tensor full, Tensor local) {
  const Tensor mine = pieces(send_, local, local.dim(2))[0];
  const std::vector<Tensor> in = pieces(receive_, local, local.dim(2));
  dev_.copy(mine, local);
  sp_.all_gather(in, mine)->wait();
  each_chunk(full, in, [&](Tensor tokens, Tensor part) { dev_.copy(tokens, part); });
}

void SequenceParallel::reduce(Tensor local, Tensor full) {
  const std::vector<Tensor> out = pieces(send_, local, local.dim(2)), in = pieces(receive_, local, local.dim(2));
  each_chunk(full, out, [&](Tensor tokens, Tensor part) { dev_.copy(part, tokens); });
  sp_.all_to_all(in, out)->wait();
  dev_.sum_pieces(out[0], in, Write::overwrite);
  dev_.copy(local, out[0]);
}

}  // namespace onescale

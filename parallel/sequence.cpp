#include "parallel/sequence.h"

#include "kernels/error.h"

namespace onescale {

std::vector<std::int32_t> local_positions(SpMode mode, std::int64_t seq_len, int sp, int rank) {
  const std::int64_t parts = mode == SpMode::gather_kv && sp > 1 ? 2 * sp : sp, chunk = seq_len / parts;
  check_usage(seq_len % parts == 0, "seq_len ", seq_len, " does not divide by ", parts, ", which sp ", sp,
              parts == sp ? " needs" : " with sp_mode gather_kv needs (2 * sp)", "; the nearest below is ",
              seq_len - seq_len % parts);
  std::vector<std::int32_t> positions;
  const auto add = [&](std::int64_t part) {
    for (std::int64_t i = 0; i < chunk; ++i) positions.push_back(static_cast<std::int32_t>(part * chunk + i));
  };
  add(rank);
  if (parts > sp) add(parts - 1 - rank);
  return positions;
}

SequenceParallel::SequenceParallel(Device& device, Communicator& sp, SpMode mode, std::int64_t seq_len,
                                   std::int64_t numel, DType dtype)
    : dev_(device), sp_(sp), mode_(mode) {
  for (int r = 0; r < sp.size(); ++r) {
    std::vector<Run> runs;
    const std::vector<std::int32_t> positions = local_positions(mode, seq_len, sp.size(), r);
    for (std::size_t i = 0; i < positions.size(); ++i) {
      if (i > 0 && positions[i] == positions[i - 1] + 1)
        ++runs.back().count;
      else
        runs.push_back({static_cast<std::int64_t>(i), positions[i], 1});
    }
    runs_.push_back(runs);
  }
  if (sp.size() == 1) return;
  send_ = device.allocate(Kind::transient, dtype, {numel});
  receive_ = device.allocate(Kind::transient, dtype, {numel});
}

std::vector<Tensor> SequenceParallel::pieces(Tensor staging, std::int64_t numel) const {
  std::vector<Tensor> list;
  for (int r = 0; r < sp_.size(); ++r) list.push_back(staging.slice(0, r * numel, (r + 1) * numel));
  return list;
}

void SequenceParallel::unpack(Tensor full, Tensor piece, int rank) {
  for (const Run& run : runs_[static_cast<std::size_t>(rank)]) {
    dev_.copy(full.slice(1, run.global, run.global + run.count), piece.slice(1, run.local, run.local + run.count));
  }
}

void SequenceParallel::pack(Tensor piece, Tensor full, int rank) {
  for (const Run& run : runs_[static_cast<std::size_t>(rank)]) {
    dev_.copy(piece.slice(1, run.local, run.local + run.count), full.slice(1, run.global, run.global + run.count));
  }
}

void SequenceParallel::to_heads(Tensor by_head, Tensor local) {
  const std::int64_t B = local.dim(0), t = local.dim(1), h = by_head.dim(2), d = local.dim(3);
  const std::vector<Tensor> out = pieces(send_, B * t * h * d), in = pieces(receive_, B * t * h * d);
  for (int r = 0; r < sp_.size(); ++r) {
    dev_.copy(out[static_cast<std::size_t>(r)].view({B, t, h, d}), local.slice(2, r * h, (r + 1) * h));
  }
  sp_.all_to_all(in, out)->wait();
  for (int r = 0; r < sp_.size(); ++r) unpack(by_head, in[static_cast<std::size_t>(r)].view({B, t, h, d}), r);
}

void SequenceParallel::to_tokens(Tensor local, Tensor by_head) {
  const std::int64_t B = local.dim(0), t = local.dim(1), h = by_head.dim(2), d = local.dim(3);
  const std::vector<Tensor> out = pieces(send_, B * t * h * d), in = pieces(receive_, B * t * h * d);
  for (int r = 0; r < sp_.size(); ++r) pack(out[static_cast<std::size_t>(r)].view({B, t, h, d}), by_head, r);
  sp_.all_to_all(in, out)->wait();
  for (int r = 0; r < sp_.size(); ++r) {
    dev_.copy(local.slice(2, r * h, (r + 1) * h), in[static_cast<std::size_t>(r)].view({B, t, h, d}));
  }
}

void SequenceParallel::gather(Tensor full, Tensor local) {
  const std::int64_t B = local.dim(0), t = local.dim(1), h = local.dim(2), d = local.dim(3);
  const Tensor mine = send_.slice(0, 0, B * t * h * d);
  const std::vector<Tensor> in = pieces(receive_, B * t * h * d);
  dev_.copy(mine.view({B, t, h, d}), local);
  sp_.all_gather(in, mine)->wait();
  for (int r = 0; r < sp_.size(); ++r) unpack(full, in[static_cast<std::size_t>(r)].view({B, t, h, d}), r);
}

void SequenceParallel::reduce(Tensor local, Tensor full) {
  const std::int64_t B = local.dim(0), t = local.dim(1), h = local.dim(2), d = local.dim(3);
  const std::vector<Tensor> out = pieces(send_, B * t * h * d), in = pieces(receive_, B * t * h * d);
  for (int r = 0; r < sp_.size(); ++r) pack(out[static_cast<std::size_t>(r)].view({B, t, h, d}), full, r);
  sp_.all_to_all(in, out)->wait();
  dev_.sum_pieces(out[0], in, Write::overwrite);
  dev_.copy(local, out[0].view({B, t, h, d}));
}

}  // namespace onescale

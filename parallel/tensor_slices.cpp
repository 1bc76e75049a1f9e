#include "parallel/tensor_slices.h"

#include <algorithm>

#include "kernels/error.h"

namespace onescale {

TensorSlices::TensorSlices(const ParameterTable& whole, int tp, int tp_rank)
    : whole_(whole), local_(whole), tp_(tp), tp_rank_(tp_rank) {
  for (std::size_t i = 0; i < whole.parameters.size(); ++i) {
    const Parameter& p = whole.parameters[i];
    Parameter& l = local_.parameters[i];
    const std::int64_t columns = p.shape.size() == 2 ? p.shape[1] : 1;
    if (p.tp_rule == TpRule::columns) {
      check_usage(columns % tp == 0, p.name, ": its ", columns, " columns do not divide by tp ", tp);
      l.shape[1] = columns / tp;
    } else if (p.tp_rule == TpRule::fused_qkv) {
      const std::int64_t cut = p.shape[0] - p.partial_rows;
      check_usage(cut % tp == 0, p.name, ": its ", cut, " rows of heads do not divide by tp ", tp);
      l.shape[0] = cut / tp + p.partial_rows;
    } else if (p.tp_rule == TpRule::rows) {
      l.shape[0] = (p.shape[0] + tp - 1) / tp;
    }
    std::int64_t real = l.numel();
    if (p.tp_rule == TpRule::rows) {
      real = std::clamp(p.shape[0] - tp_rank * l.shape[0], std::int64_t{0}, l.shape[0]) * columns;
    }
    real_.push_back(real);
    partial_from_.push_back(real - p.partial_rows * columns);
    replicated_from_.push_back(p.tp_rule == TpRule::replicated ? 0 : partial_from_.back());
  }
}

void TensorSlices::for_each_run(std::size_t parameter, std::int64_t begin, std::int64_t end,
                                const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& fn) const {
  const Parameter &whole = whole_.parameters[parameter], &local = local_.parameters[parameter];
  end = std::min(end, real_[parameter]);
  const auto run = [&](std::int64_t first, std::int64_t last, std::int64_t shift) {
    const std::int64_t from = std::max(first, begin), to = std::min(last, end);
    if (from < to) fn(from, from + shift, to - from);
  };
  if (whole.tp_rule == TpRule::replicated || tp_ == 1) {
    run(begin, end, 0);
  } else if (whole.tp_rule == TpRule::columns) {
    const std::int64_t width = local.shape[1];
    for (std::int64_t row = begin / width; row * width < end; ++row) {
      run(row * width, (row + 1) * width, row * (whole.shape[1] - width) + tp_rank_ * width);
    }
  } else {
    // Rows, the K/V rows of a fused tensor last: those lie at the end of the whole tensor too.
    const std::int64_t cut = partial_from_[parameter];
    const std::int64_t stride = whole.tp_rule == TpRule::rows ? local.numel() : cut;
    run(0, cut, tp_rank_ * stride);
    run(cut, end, whole.numel() - local.numel());
  }
}

}  // namespace onescale

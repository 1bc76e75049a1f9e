#include "parallel/tp_gradients.h"

#include <algorithm>

namespace onescale {

TpGradients::TpGradients(Device& device, Mesh& mesh, const Placement& place, Reduction reduction, bool whole)
    : dev_(device), tp_(*mesh.tp) {
  if (tp_.size() == 1) return;
  std::int64_t partial = 0;
  for (std::size_t i = 0; i < place.table().parameters.size(); ++i) {
    const int unit = place.table().parameters[i].unit;
    const std::int64_t offset = place.flat.offset[i], end = offset + place.slices.real(i);
    const auto owned = [&](std::int64_t from) {
      return whole ? Interval{unit, offset + from, end}
                   : Interval{unit, std::max(offset + from, place.owned_begin(unit)),
                              std::min(end, place.owned_end(unit))};
    };
    if (const Interval rows = owned(place.slices.partial_from(i)); rows.begin < rows.end) {
      partial_.push_back(rows);
      partial += rows.end - rows.begin;
    }
    const Interval copies = owned(place.slices.replicated_from(i));
    if (reduction != Reduction::ordered && copies.begin < copies.end) replicated_.push_back(copies);
  }
  if (partial == 0) return;
  sums_ = device.allocate(Kind::transient, DType::float32, {partial});
  staging_ = device.allocate(Kind::transient, DType::float32, {ordered_staging(tp_, partial)});
}

void TpGradients::finish(const std::vector<Owned>& gradients) {
  const auto of = [&](const Interval& interval) {
    return gradients[static_cast<std::size_t>(interval.unit)].part(interval.begin, interval.end);
  };
  std::vector<std::pair<Tensor, Tensor>> rows;  // {gradient, its place in sums_}
  std::int64_t at = 0;
  for (const Interval& interval : partial_) {
    const Tensor gradient = of(interval);
    rows.emplace_back(gradient, sums_.slice(0, at, at + gradient.numel()));
    at += gradient.numel();
  }
  for (const auto& [gradient, sum] : rows) dev_.copy(sum, gradient);
  if (!rows.empty()) ordered_all_reduce(dev_, tp_, sums_, staging_);
  for (const auto& [gradient, sum] : rows) dev_.copy(gradient, sum);
  for (const Interval& interval : replicated_) tp_.broadcast(of(interval), 0)->wait();
}

}  // namespace onescale

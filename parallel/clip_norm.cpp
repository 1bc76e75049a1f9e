#include "parallel/clip_norm.h"

#include <algorithm>
#include <cmath>

namespace onescale {

GradientNorm::GradientNorm(const Placement& place) {
  std::int64_t previous_end = -1;  // of the tensor before in the same unit
  for (std::size_t i = 0; i < place.table().parameters.size(); ++i) {
    const int unit = place.table().parameters[i].unit;
    const std::int64_t offset = place.flat.offset[i];
    const std::int64_t real = place.layout.tp_rank() == 0 ? place.slices.real(i) : place.slices.replicated_from(i);
    const std::int64_t begin = std::max(offset, place.owned_begin(unit));
    const std::int64_t end = std::min(offset + real, place.owned_end(unit));
    // Tensors with nothing but padding between them are one stretch.
    const bool joins =
        !counted_.empty() && counted_.back().unit == unit && counted_.back().end == previous_end && begin == offset;
    previous_end = offset + place.table().parameters[i].numel();
    if (begin >= end) continue;
    if (joins)
      counted_.back().end = end;
    else
      counted_.push_back({unit, begin, end});
  }
}

double GradientNorm::operator()(Device& device, Mesh& mesh, Gradients& gradients, Tensor scratch) const {
  device.fill(scratch, 0);
  for (const Interval& interval : counted_) {
    const Tensor part = gradients.owned(interval.unit).part(interval.begin, interval.end);
    device.sum_of_squares(scratch, part, Write::accumulate);
  }
  double squares = 0;
  device.download(&squares, scratch);
  double all = 0;
  for (const double s : mesh.world.exchange(squares)) all += s;
  return std::sqrt(all);
}

double clip_coefficient(double norm, double clip_norm) {
  return clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1.0;
}

}  // namespace onescale

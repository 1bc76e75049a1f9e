#include "parallel/clip_norm.h"

#include <cmath>

namespace onescale {

double gradient_norm(Device& device, Mesh& mesh, const Placement& place, Gradients& gradients, Tensor scratch) {
  std::vector<Stretch> counted;
  const std::vector<Parameter>& parameters = place.table().parameters;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::int64_t limit = place.layout.tp_rank() == 0 ? place.slices.real(i) : place.slices.replicated_from(i);
    const Stretch counts = place.owned(i, 0, limit);
    if (counts.numel() == 0) continue;
    // Tensors with nothing but padding between them are one stretch.
    if (!counted.empty() && counted.back().unit == counts.unit && counts.begin == place.flat.offset[i] &&
        counted.back().end == place.flat.offset[i - 1] + parameters[i - 1].numel())
      counted.back().end = counts.end;
    else
      counted.push_back(counts);
  }
  device.fill(scratch, 0);
  for (const Stretch& counts : counted)
    device.sum_of_squares(scratch, gradients.owned(counts.unit).part(counts), Write::accumulate);
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

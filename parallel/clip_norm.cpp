#include "parallel/clip_norm.h"

#include <cmath>

namespace onescale {

double gradient_norm(Device& device, Gradients& gradients, int units, Tensor scratch) {
  for (int unit = 0; unit < units; ++unit) {
    device.sum_of_squares(scratch, gradients.owned(unit).data, unit == 0 ? Write::overwrite : Write::accumulate);
  }
  double squares = 0;
  device.download(&squares, scratch);
  return std::sqrt(squares);
}

double clip_coefficient(double norm, double clip_norm) {
  return clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1.0;
}

}  // namespace onescale

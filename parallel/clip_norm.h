// The global gradient norm and the coefficient that clips it.
#pragma once

#include "parallel/zero.h"

namespace onescale {

// The L2 norm of the step's reduced gradient over all ranks, each logical element counted once, whoever holds copies of
// it: a rank adds up the squares of the part that it owns, without the elements that tp replicates unless it is tp rank
// 0 and without vocabulary padding; the sums, in float64, are added in rank order. scratch: float64 [1] on the device.
// The same number on every rank; not finite when any element is not.
double gradient_norm(Device& device, Mesh& mesh, const Placement& place, Gradients& gradients, Tensor scratch);

// min(1, clip_norm / norm): what every gradient is multiplied by (Pascanu et al. 2013). clip_norm 0: no clipping.
double clip_coefficient(double norm, double clip_norm);

}  // namespace onescale

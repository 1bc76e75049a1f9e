// The global gradient norm and the coefficient that clips it.
#pragma once

#include "parallel/units.h"

namespace onescale {

// The L2 norm of the step's gradient over all units, each logical element counted once; squares are added in float64 in
// a fixed order. scratch: float64 [1] on the device. Not finite when any element is not, or when a square overflows.
double gradient_norm(Device& device, Gradients& gradients, int units, Tensor scratch);

// min(1, clip_norm / norm): what every gradient is multiplied by (Pascanu et al. 2013). clip_norm 0: no clipping.
double clip_coefficient(double norm, double clip_norm);

}  // namespace onescale

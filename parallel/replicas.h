// A check that what several ranks hold alike is alike.
#pragma once

#include "parallel/zero.h"

namespace onescale {

// Compares hashes of the masters' elements that tensor parallelism replicates, and of the parameters that the ranks of
// the shard group hold whole (stages 0 to 2). Throws Error naming the unit and the ranks that differ, the same on every
// rank. Reads every parameter once on the host.
void check_replicas(Device& device, Mesh& mesh, const Placement& place, Weights& weights, int stage);

}  // namespace onescale

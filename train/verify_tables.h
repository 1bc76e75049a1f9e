// The tables of `onescale verify`, one a reported fault of other trainers: our figure, measured now, beside the faulty
// one.
#pragma once

#include "train/verify.h"

namespace onescale {

// The case's gradient in every layout, stage, reduction and sp_mode that fits, or in those that the options give, then
// the reported faults on small models of their own. Every rank of `world` calls it; rank 0 prints, ending with a
// sentence for each figure that is off. Layouts of fewer ranks run on the first ones. Returns how many are off.
int verify_tables(const Options& options, Communicator& world, const VerifyCase& c);

}  // namespace onescale

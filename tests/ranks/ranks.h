// Tests that run on real ranks: every rank runs every test, in the same order, and all call the same collectives.
#pragma once

#include "parallel/launch.h"

namespace onescale {

World& ranks();  // of this program

}  // namespace onescale

// The instruction level that a test program was started for: --isa=v3, or the widest.
#pragma once

#include <string>

namespace onescale {

const std::string& test_isa();

}  // namespace onescale

// Runs the tests of a program, at one instruction level when --isa=v3 or --isa=v4 is given.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "kernels/device.h"
#include "tests/levels.h"

namespace onescale {
namespace {

std::string chosen = "auto";

}  // namespace

const std::string& test_isa() {
  return chosen;
}

}  // namespace onescale

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i)
    if (const std::string argument = argv[i]; argument.starts_with("--isa=")) onescale::chosen = argument.substr(6);
  const std::vector<std::string> levels = onescale::cpu_levels();
  if (onescale::chosen != "auto" && std::find(levels.begin(), levels.end(), onescale::chosen) == levels.end()) {
    std::printf("skipped: this processor has no %s\n", onescale::chosen.c_str());
    return 0;
  }
  return RUN_ALL_TESTS();
}

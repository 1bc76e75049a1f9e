#include "tests/ranks/ranks.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

namespace onescale {
namespace {

World* world = nullptr;

// Rank 0 reports as usual, the others only what fails.
class Failures final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) std::cout << "rank " << world->rank() << ": " << result << '\n';
  }
};

}  // namespace

World& ranks() {
  return *world;
}

}  // namespace onescale

// ranks_test BYTES: the most of a message.
int main(int argc, char** argv) {
  using namespace onescale;
  testing::InitGoogleTest(&argc, argv);
  World own;
  world = &own;
  return own.run([&] {
    own.open(argc > 1 ? std::atoll(argv[1]) : std::int64_t{1} << 30);
    own.set_timeout(60);
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    if (own.rank() != 0) {
      delete listeners.Release(listeners.default_result_printer());
      listeners.Append(new Failures);  // NOLINT: owned by the list
    }
    return RUN_ALL_TESTS();
  });
}

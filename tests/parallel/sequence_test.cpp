#include "parallel/sequence.h"

#include <gtest/gtest.h>

#include "kernels/error.h"

namespace onescale {
namespace {

using Positions = std::vector<std::int32_t>;

TEST(LocalPositions, AreContiguousOrZigzag) {
  EXPECT_EQ(local_positions(SpMode::ulysses, 8, 2, 1), (Positions{4, 5, 6, 7}));
  EXPECT_EQ(local_positions(SpMode::gather_kv, 8, 2, 0), (Positions{0, 1, 6, 7}));
  EXPECT_EQ(local_positions(SpMode::gather_kv, 8, 2, 1), (Positions{2, 3, 4, 5}));
  EXPECT_EQ(local_positions(SpMode::gather_kv, 3, 1, 0), (Positions{0, 1, 2}));
}

// Query t sees t + 1 keys: chunks r and 2 sp - 1 - r together see as many for every r.
TEST(LocalPositions, ZigzagSharesTheWork) {
  for (const int sp : {2, 4, 8}) {
    for (int rank = 0; rank < sp; ++rank) {
      std::int64_t pairs = 0;
      for (const std::int32_t t : local_positions(SpMode::gather_kv, 64, sp, rank)) pairs += t + 1;
      EXPECT_EQ(pairs, 64 * 65 / 2 / sp);
    }
  }
}

TEST(LocalPositions, LengthsThatDoNotDivideAreRefused) {
  EXPECT_THROW(local_positions(SpMode::ulysses, 7, 2, 0), UsageError);
  EXPECT_THROW(local_positions(SpMode::gather_kv, 6, 2, 0), UsageError);
}

}  // namespace
}  // namespace onescale

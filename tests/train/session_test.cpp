#include "train/session.h"

#include <gtest/gtest.h>

namespace onescale {
namespace {

RankPeak rank(const char* host, std::initializer_list<int> cpus, std::int64_t threads, double flops) {
  RankPeak r{{}, threads, flops};
  std::copy_n(host, std::char_traits<char>::length(host), r.place.host);
  for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &r.place.cpus);
  return r;
}

// Cores of 100 FLOP/s.
TEST(CombinedPeak, CountsEachCoreOnce) {
  EXPECT_EQ(combined_peak({rank("a", {0, 1}, 2, 200)}), 200);
  EXPECT_EQ(combined_peak({rank("a", {0}, 1, 100), rank("a", {1}, 1, 100)}), 200);        // bound to one each
  EXPECT_EQ(combined_peak({rank("a", {0, 1}, 1, 100), rank("a", {0, 1}, 1, 100)}), 200);  // sharing two
  EXPECT_EQ(combined_peak(std::vector(4, rank("a", {0, 1}, 1, 100))), 200);               // four on two cores
  EXPECT_EQ(combined_peak({rank("a", {0, 1, 2, 3}, 1, 100)}), 100);                       // three cores rest
  EXPECT_EQ(combined_peak({rank("a", {0, 1}, 8, 200)}), 200);                             // more threads than cores
  EXPECT_EQ(combined_peak({rank("a", {0, 1}, 2, 200), rank("b", {0, 1}, 2, 400)}), 600);  // two machines
}

}  // namespace
}  // namespace onescale

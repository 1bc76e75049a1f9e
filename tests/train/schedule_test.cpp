#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace onescale {
namespace {

Options with(const std::string& schedule, std::int64_t steps, std::int64_t warmup, std::int64_t decay = 0) {
  Options options;
  options.schedule = schedule;
  options.lr = 3e-3;
  options.min_lr = 3e-4;
  options.steps = steps;
  options.warmup_steps = warmup;
  options.decay_steps = decay;
  return options;
}

// Values worked out by hand from the formulas: 3e-3 to 3e-4, 2 steps of warm-up, then cos at 0, 1/4, 1/2 and 3/4 of pi.
TEST(Schedule, Cosine) {
  const Options options = with("cosine", 6, 2);
  const double half = (3e-3 - 3e-4) / 2, root = std::sqrt(0.5);
  const double expected[] = {1.5e-3, 3e-3, 3e-3, 3e-4 + half * (1 + root), 3e-4 + half, 3e-4 + half * (1 - root),
                             3e-4,   3e-4};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(learning_rate(options, i), expected[i], 1e-17) << i;
}

TEST(Schedule, Linear) {
  const Options options = with("linear", 11, 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 0), 3e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 3e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 6), (3e-3 + 3e-4) / 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 11), 3e-4);
  EXPECT_DOUBLE_EQ(learning_rate(options, 1000), 3e-4);
}

TEST(Schedule, Constant) {
  const Options options = with("constant", 10, 4);
  EXPECT_DOUBLE_EQ(learning_rate(options, 0), 3e-3 / 4);
  EXPECT_DOUBLE_EQ(learning_rate(options, 3), 3e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 3e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 99), 3e-3);
}

TEST(Schedule, WarmupStableDecay) {
  const Options options = with("wsd", 20, 5, 10);
  EXPECT_DOUBLE_EQ(learning_rate(options, 4), 3e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 3e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 3e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 15), (3e-3 + 3e-4) / 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 19), 3e-3 + (3e-4 - 3e-3) * 0.9);
  EXPECT_DOUBLE_EQ(learning_rate(options, 20), 3e-4);
}

TEST(Schedule, WarmupAsLongAsTheRun) {
  for (const char* name : {"cosine", "linear", "constant"}) {
    const Options options = with(name, 3, 10);
    for (int i = 0; i < 3; ++i) EXPECT_DOUBLE_EQ(learning_rate(options, i), 3e-3 * (i + 1) / 10);
    EXPECT_TRUE(std::isfinite(learning_rate(options, 10)));
  }
}

}  // namespace
}  // namespace onescale

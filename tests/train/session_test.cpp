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

// tiny_starcoder_py: two for each of the published 164,144,128 parameters but the positions, and twice that for the
// gradients; of attention 2 H T for half of both products. The table that ids only pick rows of costs nothing.
TEST(FlopsPerToken, AreThoseOfThePublishedSizes) {
  ModelConfig c{.vocab_size = 49152, .n_positions = 8192, .n_embd = 768, .n_layer = 20, .n_head = 12, .n_inner = 3072};
  EXPECT_EQ(flops_per_token(c, 8192).parameters, 6.0 * (164144128 - 8192 * 768));
  EXPECT_EQ(flops_per_token(c, 8192).with_attention - flops_per_token(c, 8192).parameters, 3.0 * 20 * 2 * 768 * 8192);
  const double tied = flops_per_token(c, 8192).parameters;
  c.tie_word_embeddings = false;
  EXPECT_EQ(flops_per_token(c, 8192).parameters, tied);
}

}  // namespace
}  // namespace onescale

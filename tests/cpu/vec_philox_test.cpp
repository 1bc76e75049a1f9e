// Sixteen draws at once against one at a time.
#include "kernels/cpu/vec_philox.h"

#include <gtest/gtest.h>

#include <random>

namespace onescale::cpu {
namespace {

TEST(VecPhilox, SixteenAtOnceEqualOneAtATime) {
  std::mt19937 engine(1);
  for (int trial = 0; trial < 100; ++trial) {
    std::uint32_t counter[4][lanes], words[4][lanes];
    for (auto& word : counter) {
      for (std::uint32_t& x : word) x = static_cast<std::uint32_t>(engine());
    }
    const std::uint64_t key = static_cast<std::uint64_t>(engine()) << 32 | engine();
    const Philox16 draw = philox16({load(counter[0]), load(counter[1]), load(counter[2]), load(counter[3])}, key);
    for (int k = 0; k < 4; ++k) store(words[k], draw.w[k]);
    for (int i = 0; i < lanes; ++i) {
      const Philox want = philox({counter[0][i], counter[1][i], counter[2][i], counter[3][i]}, key);
      for (std::size_t k = 0; k < 4; ++k) ASSERT_EQ(words[k][i], want[k]) << "lane " << i << " word " << k;
    }
  }
}

TEST(VecPhilox, WordsComeInTheOrderOfTheirElements) {
  const Philox16 draw = by_element(philox16({load(group_order) + splat(160u), {}, {}, {}}, 5));
  std::uint32_t words[4][lanes];
  for (int i = 0; i < 4; ++i) store(words[i], draw.w[i]);
  for (std::uint32_t e = 0; e < 64; ++e)
    ASSERT_EQ(words[e / 16][e % 16], philox({160 + e / 4, 0, 0, 0}, 5)[e % 4]) << e;
}

}  // namespace
}  // namespace onescale::cpu

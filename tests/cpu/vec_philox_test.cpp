// Sixteen draws at once against one at a time.
#include "kernels/cpu/vec_philox.h"

#include <gtest/gtest.h>

#include <random>

namespace onescale::cpu {
namespace {

TEST(VecPhilox, SixteenAtOnceEqualOneAtATime) {
  std::mt19937 engine(1);
  for (int trial = 0; trial < 100; ++trial) {
    u16x counter[4];
    for (auto& word : counter) {
      for (int i = 0; i < lanes; ++i) word[i] = static_cast<std::uint32_t>(engine());
    }
    const std::uint64_t key = static_cast<std::uint64_t>(engine()) << 32 | engine();
    const Philox16 draw = philox16(counter, key);
    for (int i = 0; i < lanes; ++i) {
      const Philox want = philox({counter[0][i], counter[1][i], counter[2][i], counter[3][i]}, key);
      for (std::size_t k = 0; k < 4; ++k) ASSERT_EQ(draw.w[k][i], want[k]) << "lane " << i << " word " << k;
    }
  }
}

TEST(VecPhilox, WordsComeInTheOrderOfTheirElements) {
  u16x counter[4] = {group_order + 160, {}, {}, {}};
  const Philox16 words = by_element(philox16(counter, 5));
  for (std::uint32_t e = 0; e < 64; ++e)
    ASSERT_EQ(words.w[e / 16][e % 16], philox({160 + e / 4, 0, 0, 0}, 5)[e % 4]) << e;
}

}  // namespace
}  // namespace onescale::cpu

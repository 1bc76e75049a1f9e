#include "data/order.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace onescale {
namespace {

TEST(Order, IsAPermutationOfEverySize) {
  std::vector<std::int64_t> sizes = {1000, 1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 100003};
  for (std::int64_t n = 1; n <= 130; ++n) sizes.push_back(n);
  for (const std::int64_t n : sizes) {
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<bool> seen(static_cast<std::size_t>(n));
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t window = permute(i, n, 42, epoch);
        ASSERT_TRUE(window >= 0 && window < n) << n;
        ASSERT_FALSE(seen[static_cast<std::size_t>(window)]) << n;
        seen[static_cast<std::size_t>(window)] = true;
      }
    }
  }
}

TEST(Order, HugeSizesDoNotRepeat) {
  for (const std::int64_t n : {(std::int64_t{1} << 40) + 1, std::int64_t{3} << 60}) {
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < 2000; ++i) {
      const std::int64_t window = permute(n - 1 - i, n, 1, 0);
      ASSERT_TRUE(window >= 0 && window < n);
      ASSERT_TRUE(seen.insert(window).second);
    }
  }
}

// A random permutation has one fixed point on average, and neighbours end up independent: the correlation of index and
// window, and of a window with the next one, is 0 with standard deviation 1/sqrt(n).
TEST(Order, LooksRandom) {
  constexpr std::int64_t n = 10000;
  for (const std::uint64_t seed : {0ULL, 1ULL, 1ULL << 40}) {
    int fixed = 0, same_next_epoch = 0, same_other_seed = 0;
    double with_index = 0, with_next = 0;
    const auto centred = [](std::int64_t x) {
      return (static_cast<double>(x) - (n - 1) / 2.0) / (n / std::sqrt(12.0));
    };
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t window = permute(i, n, seed, 0);
      fixed += window == i;
      same_next_epoch += window == permute(i, n, seed, 1);
      same_other_seed += window == permute(i, n, seed + 1, 0);
      with_index += centred(window) * centred(i) / n;
      with_next += centred(window) * centred(permute((i + 1) % n, n, seed, 0)) / n;
    }
    EXPECT_LT(std::abs(with_index), 4 / std::sqrt(n));
    EXPECT_LT(std::abs(with_next), 4 / std::sqrt(n));
    EXPECT_LT(fixed, 8);  // Poisson with mean 1
    EXPECT_LT(same_next_epoch, 8);
    EXPECT_LT(same_other_seed, 8);
  }
}

}  // namespace
}  // namespace onescale

// The order of samples, without state: sample s reads window permute(s % windows, windows, seed, s / windows), another
// permutation of the windows in every epoch.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/philox.h"

namespace onescale {

// A bijection of [0, n): a Feistel network on the smallest even number of bits that holds n - 1, Philox as its round
// function, applied again while the result is not below n (cycle walking; Black and Rogaway 2002). At most four times
// as many values as n are walked, so it ends after a few steps on average.
inline std::int64_t permute(std::int64_t index, std::int64_t n, std::uint64_t seed, std::int64_t epoch) {
  if (n < 2) return 0;
  const auto half = static_cast<unsigned>(std::bit_width(static_cast<std::uint64_t>(n - 1)) + 1) / 2;
  const std::uint64_t low = (std::uint64_t{1} << half) - 1;
  auto x = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = x >> half, right = x & low;
    for (std::uint32_t round = 0; round < 4; ++round) {
      const Philox f = philox({static_cast<std::uint32_t>(right), static_cast<std::uint32_t>(epoch), round,
                               static_cast<std::uint32_t>(Site::order)},
                              seed);
      const std::uint64_t next = left ^ (f[0] & low);
      left = right;
      right = next;
    }
    x = left << half | right;
  } while (x >= static_cast<std::uint64_t>(n));
  return static_cast<std::int64_t>(x);
}

}  // namespace onescale

#include "data/order.h"

#include <bit>

#include "kernels/philox.h"

namespace onescale {
namespace {

constexpr std::uint32_t feistel_rounds = 4;

}  // namespace

std::int64_t permute(std::int64_t index, std::int64_t n, std::uint64_t seed, std::int64_t epoch) {
  if (n < 2) return 0;
  const auto half = static_cast<unsigned>(std::bit_width(static_cast<std::uint64_t>(n - 1)) + 1) / 2;
  const std::uint64_t low = (std::uint64_t{1} << half) - 1;
  auto x = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = x >> half, right = x & low;
    for (std::uint32_t round = 0; round < feistel_rounds; ++round) {
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

std::int64_t window_of_sample(std::int64_t sample, std::int64_t windows, std::uint64_t seed) {
  return permute(sample % windows, windows, seed, sample / windows);
}

}  // namespace onescale

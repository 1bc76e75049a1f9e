// The order of samples, without state: window number = f(seed, epoch, index), a permutation of the windows in every
// epoch.
#pragma once

#include <cstdint>

namespace onescale {

// A bijection of [0, n): a Feistel network on the smallest even number of bits that holds n - 1, Philox as its round
// function, applied again while the result is not below n (cycle walking; Black and Rogaway 2002). At most four times
// as many values as n are walked, so it ends after a few steps on average.
std::int64_t permute(std::int64_t index, std::int64_t n, std::uint64_t seed, std::int64_t epoch);

// The window that global sample number `sample` = step * global_batch + row reads: epoch = sample / windows.
std::int64_t window_of_sample(std::int64_t sample, std::int64_t windows, std::uint64_t seed);

}  // namespace onescale

// Counter-based random numbers: Philox4x32-10 of Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3". A
// draw is a pure function of what it is for, so every layout, thread count and cut into micro-batches sees the same
// ones.
#pragma once

#include <array>
#include <cstdint>

namespace onescale {

using Philox = std::array<std::uint32_t, 4>;

constexpr Philox philox(Philox counter, std::uint64_t key) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0], b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<std::uint32_t>(a)};
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  return counter;
}

// What a draw is for. The values are part of the format: changing one changes every run.
enum class Site : std::uint32_t {
  weight = 0,
  embedding = 1,
  attention = 2,
  attention_output = 3,
  mlp_output = 4,
  sample = 5,
  fim = 6,
  order = 7
};

struct DrawLimits {
  static constexpr std::int64_t rows = std::int64_t{1} << 20, layers = std::int64_t{1} << 8,
                                heads = std::int64_t{1} << 8;
  static constexpr std::int64_t keys = std::int64_t{1} << 26, features = std::int64_t{1} << 34,
                                positions = std::int64_t{1} << 32;
};

// The counter of a dropout draw. One draw serves four consecutive elements (features, or keys of one head): element e
// uses word e % 4 of the draw of e / 4.
//   word 0: group = e / 4; for attention, head << 24 | key / 4      word 2: step (mod 2^32)
//   word 1: global position of the (query) token                    word 3: row of the global batch << 12 | layer << 4
//   | site
// Injective within DrawLimits.
constexpr Philox dropout_counter(Site site, std::int64_t layer, std::int64_t step, std::int64_t row,
                                 std::int64_t position, std::uint32_t group) {
  return {group, static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(step),
          static_cast<std::uint32_t>(row) << 12 | static_cast<std::uint32_t>(layer) << 4 |
              static_cast<std::uint32_t>(site)};
}

constexpr std::uint32_t attention_group(std::int64_t head, std::int64_t key) {
  return static_cast<std::uint32_t>(head) << 24 | static_cast<std::uint32_t>(key >> 2);
}

// An element is dropped when its word is below this. p in [0, 1).
constexpr std::uint32_t drop_threshold(float p) {
  return static_cast<std::uint32_t>(static_cast<double>(p) * 4294967296.0);
}

}  // namespace onescale

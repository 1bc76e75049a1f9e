// Philox against the known answers of the Random123 distribution, and the packing of a dropout key.
#include "kernels/philox.h"

#include <gtest/gtest.h>

#include <random>
#include <tuple>

namespace onescale {
namespace {

// Random123 1.14.0, tests/kat_vectors, philox4x32 with 10 rounds.
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, 0), (Philox{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, ~std::uint64_t{0}), (Philox{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Philox{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

using Key = std::tuple<std::uint32_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::uint32_t>;

// The inverse of dropout_counter(), by its documented layout: a function with an inverse is injective.
Key unpack(const Philox& c) {
  return {c[3] & 15, c[3] >> 4 & 255, c[2], c[3] >> 12, c[1], c[0]};
}

void expect_recovered(Site site, std::int64_t layer, std::int64_t step, std::int64_t row, std::int64_t position,
                      std::uint32_t group) {
  ASSERT_EQ(unpack(dropout_counter(site, layer, step, row, position, group)),
            Key(static_cast<std::uint32_t>(site), layer, step, row, position, group));
}

constexpr Site sites[] = {Site::weight,     Site::embedding, Site::attention, Site::attention_output,
                          Site::mlp_output, Site::sample,    Site::fim,       Site::order};

// T = 32768, 48 heads, 88 layers: the largest model of the family.
TEST(DropoutCounter, IsInjectiveForTheLargestModel) {
  constexpr std::int64_t T = 32768, heads = 48, layers = 88;
  for (const Site site : sites) {
    for (const std::int64_t layer : {std::int64_t{0}, std::int64_t{1}, layers - 1}) {
      for (const std::int64_t row : {std::int64_t{0}, std::int64_t{1}, DrawLimits::rows - 1}) {
        for (const std::int64_t position : {std::int64_t{0}, T - 1}) {
          for (const std::int64_t head : {std::int64_t{0}, heads - 1}) {
            for (const std::int64_t key : {std::int64_t{0}, std::int64_t{4}, T - 1}) {
              const std::uint32_t group = attention_group(head, key);
              ASSERT_EQ(group >> 24, head);
              ASSERT_EQ(group & 0xffffff, key / 4);
              expect_recovered(site, layer, 1234567, row, position, group);
            }
          }
        }
      }
    }
  }
}

TEST(DropoutCounter, IsInjectiveWithinItsLimits) {
  std::mt19937_64 engine(2);
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(limit));
  };
  for (int trial = 0; trial < 100000; ++trial) {
    const std::int64_t head = below(DrawLimits::heads), key = below(DrawLimits::keys);
    const std::uint32_t group = attention_group(head, key);
    ASSERT_EQ(group >> 24, head);
    ASSERT_EQ(group & 0xffffff, key / 4);
    expect_recovered(sites[below(8)], below(DrawLimits::layers), below(std::int64_t{1} << 32), below(DrawLimits::rows),
                     below(DrawLimits::positions), group);
    const std::int64_t feature = below(DrawLimits::features);
    ASSERT_EQ(static_cast<std::uint32_t>(feature / 4), feature / 4);
  }
  expect_recovered(Site::order, DrawLimits::layers - 1, (std::int64_t{1} << 32) - 1, DrawLimits::rows - 1,
                   DrawLimits::positions - 1, ~0u);
}

TEST(DropThreshold, IsTheShareOfAllWords) {
  EXPECT_EQ(drop_threshold(0.0f), 0u);
  EXPECT_EQ(drop_threshold(0.5f), 0x80000000u);
  EXPECT_EQ(drop_threshold(0.25f), 0x40000000u);
}

}  // namespace
}  // namespace onescale

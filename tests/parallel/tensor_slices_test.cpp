#include "parallel/tensor_slices.h"

#include <gtest/gtest.h>

#include <numeric>

#include "kernels/error.h"

namespace onescale {
namespace {

struct Stretch {
  std::int64_t local, whole, count;
  bool operator==(const Stretch&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Stretch& r) {
  return out << "{" << r.local << ", " << r.whole << ", " << r.count << "}";
}

ParameterTable one(std::vector<std::int64_t> shape, TpRule rule, std::int64_t partial_rows = 0) {
  ParameterTable table;
  table.parameters.push_back({"x", std::move(shape), 0, rule, partial_rows});
  table.units = 1;
  return table;
}

std::vector<Stretch> runs(const TensorSlices& slices, std::int64_t begin = 0, std::int64_t end = 1 << 20) {
  std::vector<Stretch> all;
  slices.for_each_run(0, begin, end, [&](std::int64_t local, std::int64_t whole, std::int64_t count) {
    all.push_back({local, whole, count});
  });
  return all;
}

// Four query heads of one row, K and V of one row each, three columns: [Q Q | K V] of rank 1 holds rows 2, 3 and 4, 5.
TEST(TensorSlices, OneKeyValueHeadStaysWhole) {
  const TensorSlices first(one({6, 3}, TpRule::fused_qkv, 2), 2, 0), second(one({6, 3}, TpRule::fused_qkv, 2), 2, 1);
  EXPECT_EQ(second.local().parameters[0].shape, (std::vector<std::int64_t>{4, 3}));
  EXPECT_EQ(runs(first), (std::vector<Stretch>{{0, 0, 6}, {6, 12, 6}}));
  EXPECT_EQ(runs(second), (std::vector<Stretch>{{0, 6, 6}, {6, 12, 6}}));
  EXPECT_EQ(runs(second, 4, 8),
            (std::vector<Stretch>{{4, 10, 2}, {6, 12, 2}}));  // a shard that begins and ends in a row
  EXPECT_EQ(second.replicated_from(0), 6);
  EXPECT_EQ(second.partial_from(0), 6);
  EXPECT_EQ(second.real(0), 12);
}

// One K/V head per query head: rows are interleaved by head and cut whole; nothing is replicated or partial.
TEST(TensorSlices, ManyKeyValueHeadsAreCut) {
  const TensorSlices slices(one({12, 2}, TpRule::fused_qkv), 2, 1);
  EXPECT_EQ(runs(slices), (std::vector<Stretch>{{0, 12, 12}}));
  EXPECT_EQ(slices.replicated_from(0), 12);
  EXPECT_EQ(slices.partial_from(0), 12);
}

TEST(TensorSlices, VocabularyIsPadded) {
  for (int rank = 0; rank < 4; ++rank) {
    const TensorSlices slices(one({5, 3}, TpRule::rows), 4, rank);  // 2, 2, 1 and 0 rows
    EXPECT_EQ(slices.local().parameters[0].shape, (std::vector<std::int64_t>{2, 3}));
    const std::int64_t real = std::vector<std::int64_t>{6, 6, 3, 0}[static_cast<std::size_t>(rank)];
    EXPECT_EQ(slices.real(0), real);
    EXPECT_EQ(slices.replicated_from(0), real);
    EXPECT_EQ(runs(slices), real > 0 ? (std::vector<Stretch>{{0, rank * 6, real}}) : std::vector<Stretch>{});
  }
}

TEST(TensorSlices, ColumnsAndReplicas) {
  const TensorSlices columns(one({2, 6}, TpRule::columns), 3, 1);
  EXPECT_EQ(runs(columns), (std::vector<Stretch>{{0, 2, 2}, {2, 8, 2}}));
  EXPECT_EQ(runs(columns, 1, 3), (std::vector<Stretch>{{1, 3, 1}, {2, 8, 1}}));
  const TensorSlices whole(one({7}, TpRule::replicated), 3, 2);
  EXPECT_EQ(runs(whole), (std::vector<Stretch>{{0, 0, 7}}));
  EXPECT_EQ(whole.replicated_from(0), 0);
  EXPECT_EQ(whole.partial_from(0), 7);
}

TEST(TensorSlices, WhatDoesNotDivideIsRefused) {
  EXPECT_THROW(TensorSlices(one({7, 3}, TpRule::fused_qkv, 2), 2, 0), UsageError);
  EXPECT_THROW(TensorSlices(one({2, 5}, TpRule::columns), 2, 0), UsageError);
}

}  // namespace
}  // namespace onescale

#include "parallel/layout.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/temp_dir.h"

namespace onescale {
namespace {

using Ranks = std::vector<int>;

// Written by hand: tp varies fastest, then sp, then dp.
TEST(Layout, TwelveRanksAsDp2Sp3Tp2) {
  const Layout layout = make_layout(12, 9, 3, 2);  // 9 = 1 * 6 + 1 * 2 + 1
  EXPECT_EQ(layout.dp, 2);
  EXPECT_EQ(layout.dp_rank(), 1);
  EXPECT_EQ(layout.sp_rank(), 1);
  EXPECT_EQ(layout.tp_rank(), 1);
  EXPECT_EQ(layout.shard_rank(), 4);
  EXPECT_EQ(layout.shards(), 6);
  EXPECT_EQ(layout.tp_group(), (Ranks{8, 9}));
  EXPECT_EQ(layout.sp_group(), (Ranks{7, 9, 11}));
  EXPECT_EQ(layout.dp_group(), (Ranks{3, 9}));
  EXPECT_EQ(layout.shard_group(), (Ranks{1, 3, 5, 7, 9, 11}));
  EXPECT_EQ(layout.text(), "dp=2 sp=3 tp=2");
}

// The groups of one kind are a partition of all ranks, and a rank's place in its group is its rank there.
TEST(Layout, GroupsPartitionTheRanks) {
  for (const int dp : {1, 2, 3}) {
    for (const int sp : {1, 2, 4}) {
      for (const int tp : {1, 2, 3}) {
        const int world = dp * sp * tp;
        std::set<Ranks> groups[4];
        for (int rank = 0; rank < world; ++rank) {
          const Layout layout = make_layout(world, rank, sp, tp);
          const Ranks of[4] = {layout.tp_group(), layout.sp_group(), layout.dp_group(), layout.shard_group()};
          const int place[4] = {layout.tp_rank(), layout.sp_rank(), layout.dp_rank(), layout.shard_rank()};
          for (int k = 0; k < 4; ++k) {
            EXPECT_EQ(of[k].at(static_cast<std::size_t>(place[k])), rank) << layout.text() << ", kind " << k;
            groups[k].insert(of[k]);
          }
        }
        const int size[4] = {tp, sp, dp, dp * sp};
        for (int k = 0; k < 4; ++k) {
          EXPECT_EQ(groups[k].size(), static_cast<std::size_t>(world / size[k]));
          std::set<int> ranks;
          for (const Ranks& group : groups[k]) ranks.insert(group.begin(), group.end());
          EXPECT_EQ(ranks.size(), static_cast<std::size_t>(world));
        }
      }
    }
  }
}

TEST(Layout, AWorldThatDoesNotDivideIsRefused) {
  EXPECT_THROW(make_layout(6, 0, 2, 2), UsageError);
  EXPECT_EQ(sentence([] { make_layout(6, 0, 2, 2); }),
            "sp 2 * tp 2 = 4 does not divide the 6 ranks of this job; start a multiple of 4 ranks or lower sp or tp");
}

}  // namespace
}  // namespace onescale

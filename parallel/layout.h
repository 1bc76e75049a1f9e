// Which rank does what: world = dp * sp * tp, tp varying fastest, then sp, then dp. Pure arithmetic.
#pragma once

#include <string>
#include <vector>

namespace onescale {

struct Layout {
  int dp = 1, sp = 1, tp = 1, rank = 0;

  int world() const { return dp * sp * tp; }
  int tp_rank() const { return rank % tp; }
  int sp_rank() const { return rank / tp % sp; }
  int dp_rank() const { return rank / (tp * sp); }
  // Position in the group that shards parameters and sums gradients: all of dp x sp for one tp rank.
  int shard_rank() const { return rank / tp; }
  int shards() const { return dp * sp; }

  // The ranks of this rank's groups, ascending; the position is the rank within the group.
  std::vector<int> tp_group() const;     // same dp, sp
  std::vector<int> sp_group() const;     // same dp, tp
  std::vector<int> dp_group() const;     // same sp, tp
  std::vector<int> shard_group() const;  // same tp

  std::string text() const;  // "dp=2 sp=1 tp=2"
};

// The layout of `rank` among `world` ranks. Throws UsageError where sp * tp does not divide world.
Layout make_layout(int world, int rank, int sp, int tp);

}  // namespace onescale

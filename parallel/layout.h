// Which rank does what: world = dp * sp * tp, tp varying fastest, then sp, then dp. Pure arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/error.h"

namespace onescale {

// The place of a rank, a unit or another number in a vector.
constexpr std::size_t index(std::int64_t number) {
  return static_cast<std::size_t>(number);
}

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
  std::vector<int> tp_group() const { return every(rank - tp_rank(), 1, tp); }                  // same dp, sp
  std::vector<int> sp_group() const { return every(rank - sp_rank() * tp, tp, sp); }            // same dp, tp
  std::vector<int> dp_group() const { return every(rank - dp_rank() * sp * tp, sp * tp, dp); }  // same sp, tp
  std::vector<int> shard_group() const { return every(tp_rank(), tp, shards()); }               // same tp

  std::string text() const { return str("dp=", dp, " sp=", sp, " tp=", tp); }

 private:
  static std::vector<int> every(int first, int stride, int count) {
    std::vector<int> ranks;
    for (int i = 0; i < count; ++i) ranks.push_back(first + i * stride);
    return ranks;
  }
};

// The layout of `rank` among `world` ranks. Throws UsageError where sp * tp does not divide world.
inline Layout make_layout(int world, int rank, int sp, int tp) {
  check_usage(sp >= 1 && tp >= 1 && world % (sp * tp) == 0, "sp ", sp, " * tp ", tp, " = ", sp * tp,
              " does not divide the ", world, " ranks of this job; start a multiple of ", sp * tp,
              " ranks or lower sp or tp");
  return {world / (sp * tp), sp, tp, rank};
}

}  // namespace onescale

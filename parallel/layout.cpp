#include "parallel/layout.h"

#include "kernels/error.h"

namespace onescale {

namespace {

std::vector<int> every(int first, int stride, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * stride);
  return ranks;
}

}  // namespace

std::vector<int> Layout::tp_group() const {
  return every(rank - tp_rank(), 1, tp);
}

std::vector<int> Layout::sp_group() const {
  return every(rank - sp_rank() * tp, tp, sp);
}

std::vector<int> Layout::dp_group() const {
  return every(rank - dp_rank() * sp * tp, sp * tp, dp);
}

std::vector<int> Layout::shard_group() const {
  return every(tp_rank(), tp, shards());
}

std::string Layout::text() const {
  return str("dp=", dp, " sp=", sp, " tp=", tp);
}

Layout make_layout(int world, int rank, int sp, int tp) {
  check_usage(sp >= 1 && tp >= 1 && world % (sp * tp) == 0, "sp ", sp, " * tp ", tp, " = ", sp * tp,
              " does not divide the ", world, " ranks of this job; start a multiple of ", sp * tp,
              " ranks or lower sp or tp");
  return {world / (sp * tp), sp, tp, rank};
}

}  // namespace onescale

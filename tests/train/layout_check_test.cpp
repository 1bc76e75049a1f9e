#include "train/layout_check.h"

#include <gtest/gtest.h>

#include <limits>

#include "kernels/error.h"

namespace onescale {
namespace {

template <class Call>
std::string error(const Call& call) {
  try {
    call();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

std::string refused(std::int64_t n_head, std::int64_t n_inner, std::int64_t seq_len, int sp, int tp,
                    const char* sp_mode = "ulysses") {
  const ModelConfig config{
      .vocab_size = 99, .n_positions = 8192, .n_embd = 8 * n_head, .n_head = n_head, .n_inner = n_inner};
  return error([&] { check_layout(config, seq_len, make_layout(sp * tp, 0, sp, tp), sp_mode); });
}

TEST(LayoutCheck, HeadsAndTheInnerSizeDivideByTp) {
  EXPECT_EQ(refused(22, 88, 64, 1, 2), "");
  EXPECT_EQ(refused(22, 88, 64, 1, 4), "n_head is 22, which tp 4 does not divide; tp may be 1, 2, 11 or 22");
  EXPECT_EQ(refused(4, 37, 64, 1, 2), "n_inner is 37, which tp 2 does not divide; tp may be 1");
  EXPECT_EQ(refused(12, 30, 64, 1, 4), "n_inner is 30, which tp 4 does not divide; tp may be 1, 2, 3 or 6");
}

TEST(LayoutCheck, HeadsDivideBySpAndTpUnlessKvIsGathered) {
  EXPECT_EQ(refused(12, 48, 64, 2, 2), "");
  EXPECT_EQ(refused(12, 48, 64, 4, 2),
            "n_head is 12, which sp 4 * tp 2 = 8 does not divide; with tp 2, sp may be 1, 2, 3 or 6, or sp_mode "
            "gather_kv takes any number of heads");
  EXPECT_EQ(refused(22, 88, 64, 4, 1),
            "n_head is 22, which sp 4 does not divide; sp may be 1, 2, 11 or 22, or sp_mode gather_kv takes any number "
            "of heads");
  EXPECT_EQ(refused(22, 88, 64, 8, 2, "gather_kv"), "");
  EXPECT_EQ(refused(22, 88, 64, 2, 4, "gather_kv"),
            "n_head is 22, which tp 4 does not divide; tp may be 1, 2, 11 or 22");
}

TEST(LayoutCheck, RowsDivideBySp) {
  EXPECT_EQ(refused(8, 32, 12, 4, 1), "");
  EXPECT_EQ(refused(8, 32, 1002, 4, 1),
            "seq_len is 1002, no multiple of sp 4; the nearest that fit are 1000 and 1004, or lower sp");
  EXPECT_EQ(refused(8, 32, 12, 4, 1, "gather_kv"),
            "seq_len is 12, no multiple of 2 * sp 4 = 8; the nearest that fit are 8 and 16, or lower sp");
  EXPECT_EQ(refused(8, 32, 13, 1, 2, "gather_kv"), "");  // one rank has whole rows
  EXPECT_EQ(refused(8, 32, 5, 8, 1), "seq_len is 5, no multiple of sp 8; the nearest that fits is 8, or lower sp");
}

TEST(LayoutCheck, BatchesDivideOverTheRanks) {
  const auto batch = [](std::int64_t global_batch, std::int64_t micro_batch, int dp) {
    return error([&] { check_batch(global_batch, micro_batch, make_layout(dp, 0, 1, 1)); });
  };
  EXPECT_EQ(batch(32, 4, 8), "");
  EXPECT_EQ(batch(30, 1, 8), "global_batch is 30, no multiple of dp 8; the nearest that fit are 24 and 32");
  EXPECT_EQ(batch(6, 2, 8), "global_batch is 6, no multiple of dp 8; the nearest that fits is 8");
  EXPECT_EQ(batch(48, 4, 8),
            "micro_batch is 4, which does not divide global_batch 48 / dp 8 = 6; it may be 1, 2, 3 or 6");
  EXPECT_EQ(batch(32, 5, 1), "micro_batch is 5, which does not divide global_batch 32; it may be 1, 2, 4, 8, 16 or 32");
}

TEST(LayoutCheck, TheWorldDivides) {
  EXPECT_EQ(error([] { make_layout(6, 0, 2, 2); }),
            "sp 2 * tp 2 = 4 does not divide the 6 ranks of this job; start a multiple of 4 ranks or lower sp or tp");
}

}  // namespace
}  // namespace onescale

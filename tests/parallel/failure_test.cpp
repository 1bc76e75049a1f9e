// Jobs of real ranks that go wrong: one sentence, first on standard error, once; the exit code; an end within 10 s.
#include "tests/job.h"

namespace onescale {
namespace {

Ended run(const std::string& command) {
  Ended ended = run_job(command);
  EXPECT_LT(ended.seconds, soon);
  return ended;
}

Ended on_ranks(int ranks, const std::string& way) {
  return run(MPIRUN " -n " + std::to_string(ranks) + " " FAILING_RANKS " " + way);
}

TEST(Failure, OfOneRankEndsTheJobWithItsSentence) {
  const Ended ended = on_ranks(4, "one");
  EXPECT_EQ(ended.code, 1) << ended.error;
  EXPECT_EQ(ended.first_line(), "onescale: rank 3 finds its file broken");
  EXPECT_EQ(ended.sentences(), 1) << ended.error;
}

TEST(Failure, OfAllRanksIsSaidOnce) {
  const Ended ended = on_ranks(4, "all");
  EXPECT_EQ(ended.code, 1) << ended.error;
  EXPECT_EQ(ended.first_line(), "onescale: every rank finds this file broken");
  EXPECT_EQ(ended.sentences(), 1) << ended.error;
}

TEST(Failure, AWrongSettingLeavesWith2) {
  const Ended ended = on_ranks(4, "usage");
  EXPECT_EQ(ended.code, 2) << ended.error;
  EXPECT_EQ(ended.first_line(), "onescale: every rank finds this setting wrong");
  EXPECT_EQ(ended.sentences(), 1) << ended.error;
  EXPECT_EQ(ended.error.find("MPI_ABORT"), std::string::npos) << ended.error;
}

TEST(Failure, AKilledRankEndsTheJob) {
  EXPECT_NE(on_ranks(4, "kill").code, 0);
}

TEST(Failure, ARankThatDoesNotComeIsNamed) {
  const Ended ended = on_ranks(3, "absent");
  EXPECT_EQ(ended.code, 1) << ended.error;
  EXPECT_EQ(ended.first_line(),
            "onescale: barrier in group world at step 7 waits longer than comm_timeout, 1 s: rank 2 did not come; see "
            "what holds up there, or give a larger comm_timeout");
  EXPECT_EQ(ended.sentences(), 1) << ended.error;
}

TEST(Failure, RanksInDifferentCollectivesAreNamed) {
  const Ended ended = on_ranks(2, "apart");
  EXPECT_EQ(ended.code, 1) << ended.error;
  EXPECT_EQ(ended.first_line(),
            "onescale: barrier in group world at step 7 waits longer than comm_timeout, 1 s: every rank waits, but not "
            "all for the same: rank 0 in barrier of group world at step 7, rank 1 in exchange of group world at step "
            "7");
  EXPECT_EQ(ended.sentences(), 1) << ended.error;
}

TEST(Failure, RanksLeaveTogether) {
  EXPECT_EQ(on_ranks(4, "requeue").code, 75);
}

TEST(Failure, RanksThatMpiDidNotStartAreRefusedByRank0) {
  const Ended first = run("RANK=0 WORLD_SIZE=2 " FAILING_RANKS), second = run("RANK=1 WORLD_SIZE=2 " FAILING_RANKS);
  EXPECT_EQ(first.code, 2);
  EXPECT_EQ(first.error,
            "onescale: torchrun (RANK) says rank 0 of 2, but MPI sees a single process; start the ranks with srun "
            "--mpi=pmix, or with mpirun\n");
  EXPECT_EQ(second.code, 2);
  EXPECT_EQ(second.error, "");
}

TEST(Failure, SourcesThatDisagreeAreRefusedByRank0) {
  const Ended ended = run("WORLD_SIZE=8 RANK=0 " MPIRUN " -n 2 " FAILING_RANKS);
  EXPECT_EQ(ended.code, 2);
  EXPECT_EQ(ended.first_line(),
            "onescale: Open MPI (OMPI_COMM_WORLD_RANK) says rank 0 of 2, but torchrun (RANK) says rank 0 of 8; unset "
            "the variables of the one that did not start this process");
  EXPECT_EQ(ended.sentences(), 1) << ended.error;
}

}  // namespace
}  // namespace onescale

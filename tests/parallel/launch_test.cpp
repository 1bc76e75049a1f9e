#include "parallel/launch.h"

#include <gtest/gtest.h>

#include <map>

#include "kernels/error.h"

namespace onescale {
namespace {

using Environment = std::map<std::string, const char*>;

Launch launch(const Environment& environment) {
  return find_launch([&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second;
  });
}

const Environment open_mpi = {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}};
const Environment slurm = {{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "4"}};

Environment operator+(Environment a, const Environment& b) {
  a.insert(b.begin(), b.end());
  return a;
}

void expect(const Launch& found, int rank, int world, bool mpi, const std::string& source) {
  EXPECT_EQ(found.rank, rank);
  EXPECT_EQ(found.world, world);
  EXPECT_EQ(found.mpi, mpi);
  EXPECT_EQ(found.source, source);
}

TEST(Launch, FindsTheRankThatEachLauncherGives) {
  expect(launch({}), 0, 1, false, "");
  expect(launch(open_mpi), 5, 8, true, "Open MPI (OMPI_COMM_WORLD_RANK)");
  expect(launch(open_mpi + Environment{{"PMIX_RANK", "5"}}), 5, 8, true, "Open MPI (OMPI_COMM_WORLD_RANK)");
  expect(launch({{"PMIX_RANK", "5"}}), 5, 0, true, "PMIx (PMIX_RANK)");
  expect(launch(slurm + Environment{{"PMIX_RANK", "3"}}), 3, 4, true, "PMIx (PMIX_RANK)");
  for (const Environment& fine :
       {Environment{}, open_mpi, Environment{{"PMIX_RANK", "5"}}, slurm + Environment{{"PMIX_RANK", "3"}}}) {
    EXPECT_EQ(launch(fine).problem, "");
  }
}

// SLURM_NTASKS is in the batch shell too, where a process is none of that many ranks.
TEST(Launch, ABatchShellIsNoRank) {
  const Launch found = launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}});
  expect(found, 0, 1, false, "");
  EXPECT_EQ(found.problem, "");
}

TEST(Launch, RanksThatMpiCannotConnectAreAProblem) {
  EXPECT_EQ(launch(slurm).problem,
            "Slurm (SLURM_PROCID) says rank 3 of 4, but MPI sees a single process; start the ranks with srun "
            "--mpi=pmix, or with mpirun");
  EXPECT_NE(launch({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}).problem, "");
  EXPECT_NE(launch({{"RANK", "1"}, {"WORLD_SIZE", "2"}}).problem, "");
  EXPECT_EQ(launch({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}).problem, "");
}

TEST(Launch, SourcesThatDisagreeAreAProblem) {
  const Launch found = launch(open_mpi + Environment{{"RANK", "5"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(found.rank, 5);
  EXPECT_EQ(found.problem,
            "Open MPI (OMPI_COMM_WORLD_RANK) says rank 5 of 8, but torchrun (RANK) says rank 5 of 2; unset the "
            "variables of the one that did not start this process");
  EXPECT_NE(launch(slurm + Environment{{"PMIX_RANK", "2"}}).problem, "");
  EXPECT_EQ(launch(open_mpi + Environment{{"RANK", "5"}, {"WORLD_SIZE", "8"}}).problem, "");
}

// mpirun starts its daemons as a Slurm step of their own, or runs within one of a single task.
TEST(Launch, TheStepOfMpirunsDaemonsIsNotAsked) {
  const Launch found = launch(open_mpi + Environment{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}});
  expect(found, 5, 8, true, "Open MPI (OMPI_COMM_WORLD_RANK)");
  EXPECT_EQ(found.problem, "");
}

TEST(Launch, WhatIsNoNumberIsAProblem) {
  EXPECT_EQ(launch({{"OMPI_COMM_WORLD_RANK", "x"}, {"OMPI_COMM_WORLD_SIZE", "2"}}).problem,
            "OMPI_COMM_WORLD_RANK = 'x' is no number; unset it");
  EXPECT_EQ(launch({{"RANK", "colonel"}}).problem, "");  // of no launcher: WORLD_SIZE is not there
}

TEST(World, ByItselfIsOneProcessThatReportsItsOwnErrors) {
  World world;
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.communicator().size(), 1);
  world.check_same("the options", "lr = 1");
  EXPECT_EQ(world.run([] { return 75; }), 75);
  testing::internal::CaptureStderr();
  EXPECT_EQ(world.run([]() -> int { throw UsageError("lr = x is no number"); }), 2);
  EXPECT_EQ(world.run([]() -> int { throw Error("the disk is full"); }), 1);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "onescale: lr = x is no number\nonescale: the disk is full\n");
}

}  // namespace
}  // namespace onescale

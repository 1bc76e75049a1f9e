#include "train/signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

namespace onescale {
namespace {

TEST(StopSignals, RemembersTheFirst) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    catch_stop_signals();
    EXPECT_EQ(stop_signal(), 0);
    raise(signal);
    EXPECT_EQ(stop_signal(), signal);
    raise(SIGUSR1);  // never ends the process
    EXPECT_EQ(stop_signal(), signal);
  }
}

TEST(StopSignals, WhatNohupIgnoresStaysIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  catch_stop_signals();
  raise(SIGHUP);
  EXPECT_EQ(stop_signal(), 0);
  std::signal(SIGHUP, before);
}

TEST(StopSignalsDeathTest, ASecondOneEndsAtOnce) {
  const auto twice = [](int first, int second) {
    catch_stop_signals();
    raise(first);
    raise(second);  // of the same request: timeout(1) signals the process and its group
    usleep(600'000);
    raise(second);
    _exit(0);
  };
  EXPECT_EXIT(twice(SIGINT, SIGINT), testing::ExitedWithCode(128 + SIGINT), "");
  EXPECT_EXIT(twice(SIGUSR1, SIGTERM), testing::ExitedWithCode(128 + SIGTERM), "");
  EXPECT_EXIT(twice(SIGTERM, SIGUSR1), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(twice(SIGHUP, SIGHUP), testing::ExitedWithCode(0), "");  // a terminal that goes says so more than once
}

}  // namespace
}  // namespace onescale

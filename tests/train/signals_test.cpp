#include "train/signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "kernels/error.h"

namespace onescale {
namespace {

TEST(StopSignals, RemembersTheFirst) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    const StopSignals stop;
    EXPECT_EQ(stop.received(), 0);
    raise(signal);
    EXPECT_EQ(stop.received(), signal);
    raise(SIGUSR1);  // never ends the process
    EXPECT_EQ(stop.received(), signal);
  }
}

TEST(StopSignals, OneObjectAtATime) {
  const StopSignals stop;
  EXPECT_THROW(StopSignals(), Error);
}

volatile std::sig_atomic_t mine = 0;  // NOLINT
void handler(int) {
  mine = mine + 1;
}

TEST(StopSignals, RestoresTheHandlersBefore) {
  struct sigaction action = {}, old = {};
  action.sa_handler = handler;
  sigaction(SIGUSR1, &action, &old);
  {
    const StopSignals stop;
    raise(SIGUSR1);
    EXPECT_EQ(mine, 0);
  }
  raise(SIGUSR1);
  EXPECT_EQ(mine, 1);
  sigaction(SIGUSR1, &old, nullptr);
}

TEST(StopSignalsDeathTest, ASecondOneEndsAtOnce) {
  const auto twice = [](int first, int second) {
    const StopSignals stop;
    raise(first);
    raise(second);  // of the same request: timeout(1) signals the process and its group
    usleep(600'000);
    raise(second);
    _exit(0);
  };
  EXPECT_EXIT(twice(SIGINT, SIGINT), testing::ExitedWithCode(128 + SIGINT), "");
  EXPECT_EXIT(twice(SIGUSR1, SIGTERM), testing::ExitedWithCode(128 + SIGTERM), "");
  EXPECT_EXIT(twice(SIGTERM, SIGUSR1), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace onescale

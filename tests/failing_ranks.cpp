// A program that goes wrong in one of several ways, for parallel/failure_test.cpp to start.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "kernels/error.h"
#include "parallel/launch.h"

int main(int argc, char** argv) {
  using namespace onescale;
  const std::string way = argc > 1 ? argv[1] : "";
  World world;
  return world.run([&] {
    world.open();
    Communicator& all = world.communicator();
    all.barrier();
    world.set_step(7);
    world.set_timeout(1);
    const int last = all.size() - 1;
    check(way != "all", "every rank finds this file broken");
    check_usage(way != "usage", "every rank finds this setting wrong");
    std::signal(SIGTERM, [](int) {});  // as the trainer, which saves then
    if (all.rank() == last) {
      check(way != "one", "rank ", last, " finds its file broken");
      if (way == "kill") raise(SIGKILL);
      if (way == "absent") sleep(60);
      if (way == "requeue") usleep(300'000);
      if (way == "apart") all.exchange(1);
    }
    if (way == "one" || way == "kill" || way == "requeue") world.set_timeout(60);
    if (way != "requeue") all.barrier();
    return way == "requeue" ? 75 : 0;
  });
}

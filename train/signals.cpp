#include "train/signals.h"

#include <unistd.h>

#include <cstdint>
#include <ctime>

#include "kernels/error.h"

namespace onescale {
namespace {

constexpr std::array<int, 3> stop_signals = {SIGINT, SIGTERM, SIGUSR1};

// A handler can reach nothing but static storage; StopSignals owns it while it lives.
volatile std::sig_atomic_t first_signal = 0;  // NOLINT
volatile std::sig_atomic_t first_time = 0;    // NOLINT, in milliseconds modulo 2^30
volatile std::sig_atomic_t installed = 0;     // NOLINT

constexpr std::int64_t time_mask = (1 << 30) - 1;

std::sig_atomic_t milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::sig_atomic_t>((std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000) & time_mask);
}

// Launchers and timeout(1) signal a process and then its group: what follows within half a second is the same request.
extern "C" void on_stop_signal(int signal) {
  if (first_signal == 0) {
    first_time = milliseconds();
    first_signal = signal;
  } else if (signal != SIGUSR1 && ((milliseconds() - first_time) & time_mask) > 500) {
    _exit(128 + signal);
  }
}

}  // namespace

StopSignals::StopSignals() {
  check(installed == 0, "StopSignals: the handlers are installed already: keep one object at a time");
  installed = 1;
  first_signal = 0;
  struct sigaction action = {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;  // reads and writes under way go on
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < stop_signals.size(); ++i) sigaction(stop_signals[i], &action, &old_[i]);
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < stop_signals.size(); ++i) sigaction(stop_signals[i], &old_[i], nullptr);
  installed = 0;
}

int StopSignals::received() const {
  return first_signal;
}

}  // namespace onescale

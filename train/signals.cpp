#include "train/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <ctime>
#include <initializer_list>

namespace onescale {
namespace {

// A handler can reach nothing but static storage.
volatile std::sig_atomic_t first_signal = 0;  // NOLINT
volatile std::sig_atomic_t first_time = 0;    // NOLINT, in milliseconds modulo 2^30

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
  } else if ((signal == SIGINT || signal == SIGTERM) && ((milliseconds() - first_time) & time_mask) > 500) {
    _exit(128 + signal);
  }
}

}  // namespace

void guard_descriptors() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDONLY);
  if (fd >= 0) ::close(fd);
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}

void catch_stop_signals() {
  first_signal = 0;
  struct sigaction action = {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;  // reads and writes under way go on
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
  struct sigaction before = {};
  if (sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

int stop_signal() {
  return first_signal;
}

}  // namespace onescale

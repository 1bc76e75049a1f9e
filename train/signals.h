// SIGINT, SIGTERM and SIGUSR1 ask for a stop; the trainer looks at the flag between steps, saves and exits 75.
#pragma once

#include <array>
#include <csignal>

namespace onescale {

// Handlers are installed while an object lives; one object at a time. A second SIGINT or SIGTERM, more than half a
// second later, ends the process at once with 128 + signal.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The first signal that arrived, 0 for none.
  int received() const;

 private:
  std::array<struct sigaction, 3> old_;
};

}  // namespace onescale

// SIGINT, SIGTERM and SIGUSR1 ask for a stop; the trainer looks at the flag between steps, saves and exits 75.
#pragma once

namespace onescale {

// Installs the handlers and forgets a signal of before. A second SIGINT or SIGTERM, more than half a second after the
// first signal, ends the process at once with 128 + signal.
void catch_stop_signals();

// The first signal that arrived, 0 for none.
int stop_signal();

}  // namespace onescale

// SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask for a stop; the trainer looks at the flag between steps, saves and exits 75.
#pragma once

namespace onescale {

// Called before anything else. A standard descriptor that was closed is opened, for a file of ours that got its number
// would receive what is printed; writing there fails as before. A reader that has gone and a limit on file sizes are
// failures of a write, not the end of the process.
void guard_descriptors();

// Installs the handlers and forgets a signal of before. SIGHUP stays ignored where nohup has it so. A second SIGINT or
// SIGTERM, more than half a second after the first signal, ends the process at once with 128 + signal.
void catch_stop_signals();

// The first signal that arrived, 0 for none.
int stop_signal();

}  // namespace onescale

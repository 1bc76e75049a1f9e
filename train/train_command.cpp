// `onescale train`: one command starts a run, resumes it after any interruption, and says when it is finished.
#include "train/commands.h"
#include "train/training_run.h"

namespace onescale {

int train_command(const Options& options, World& world) {
  return TrainingRun(options, world).run();
}

}  // namespace onescale

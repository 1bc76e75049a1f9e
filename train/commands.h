// The commands; each returns the program's exit code: 0 done, 75 saved and wants to be started again.
#pragma once

#include "parallel/launch.h"
#include "train/options.h"

namespace onescale {

inline constexpr int exit_requeue = 75;

int prepare_command(const Options& options);
int train_command(const Options& options, World& world);
int eval_command(const Options& options);
int generate_command(const Options& options);
int export_command(const Options& options);
int plan_command(const Options& options);
int gradients_command(const Options& options, World& world);
int verify_command(const Options& options, World& world);

}  // namespace onescale

#include <cstdio>
#include <map>
#include <set>
#include <string>

#include "kernels/error.h"
#include "train/commands.h"
#include "train/metrics.h"
#include "train/session.h"
#include "train/signals.h"

int main(int argc, char** argv) {
  using namespace onescale;
  guard_descriptors();
  const std::map<std::string, int (*)(const Options&)> commands = {{"prepare", prepare_command},
                                                                   {"eval", eval_command},
                                                                   {"generate", generate_command},
                                                                   {"export", export_command},
                                                                   {"plan", plan_command}};
  const std::map<std::string, int (*)(const Options&, World&)> commands_on_ranks = {
      {"train", train_command}, {"gradients", gradients_command}, {"verify", verify_command}};
  const std::set<std::string> results_on_output = {"eval", "generate", "plan", "verify"};
  World world;
  return world.run([&] {
    const auto on_ranks = commands_on_ranks.find(argc > 1 ? argv[1] : "");
    if (on_ranks != commands_on_ranks.end()) world.open();
    const Parsed parsed = parse(argc, argv);
    if (on_ranks == commands_on_ranks.end() && parsed.text.empty())
      world.stay_alone("onescale " + parsed.options.command);
    if (!parsed.text.empty()) {
      if (world.rank() == 0) std::fputs(parsed.text.c_str(), parsed.exit_code == 0 ? stdout : stderr);
      check_output();
      return parsed.exit_code;
    }
    world.set_timeout(parsed.options.comm_timeout);
    if (world.rank() == 0 && world.launch().world > 1) {
      std::printf("%d ranks from %s\n", world.launch().world, world.launch().source.c_str());
    }
    if (on_ranks != commands_on_ranks.end()) {
      const std::string idle = idle_cpus(parsed.options, world.launch(), world.communicator());
      if (world.rank() == 0 && !idle.empty()) std::printf("%s\n", idle.c_str());
    }
    const int code = on_ranks != commands_on_ranks.end() ? on_ranks->second(parsed.options, world)
                                                         : commands.at(parsed.options.command)(parsed.options);
    // The others have their result in files, and go on without a reader.
    if (results_on_output.contains(parsed.options.command)) check_output();
    return code;
  });
}

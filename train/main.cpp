#include <cstdio>
#include <map>
#include <string>

#include "kernels/error.h"
#include "train/commands.h"

int main(int argc, char** argv) {
  using namespace onescale;
  const std::map<std::string, int (*)(const Options&)> commands = {{"prepare", prepare_command},
                                                                   {"eval", eval_command},
                                                                   {"generate", generate_command},
                                                                   {"export", export_command},
                                                                   {"plan", plan_command}};
  const std::map<std::string, int (*)(const Options&, World&)> commands_on_ranks = {
      {"train", train_command}, {"gradients", gradients_command}, {"verify", verify_command}};
  World world;
  return world.run([&] {
    const auto on_ranks = commands_on_ranks.find(argc > 1 ? argv[1] : "");
    if (on_ranks != commands_on_ranks.end()) world.open();
    const Parsed parsed = parse(argc, argv);
    if (on_ranks == commands_on_ranks.end() && parsed.text.empty())
      world.stay_alone("onescale " + parsed.options.command);
    if (!parsed.text.empty()) {
      if (world.rank() == 0) std::fputs(parsed.text.c_str(), parsed.exit_code == 0 ? stdout : stderr);
      return parsed.exit_code;
    }
    world.set_timeout(parsed.options.comm_timeout);
    if (world.rank() == 0 && world.launch().world > 1) {
      std::printf("%d ranks from %s\n", world.launch().world, world.launch().source.c_str());
    }
    const int code = on_ranks != commands_on_ranks.end() ? on_ranks->second(parsed.options, world)
                                                         : commands.at(parsed.options.command)(parsed.options);
    check(std::fflush(stdout) == 0 && std::ferror(stdout) == 0,
          "standard output cannot be written; its reader is gone or the disk full");
    return code;
  });
}

#include <cstdio>
#include <exception>
#include <map>
#include <new>
#include <string>

#include "kernels/error.h"
#include "train/commands.h"

int main(int argc, char** argv) {
  using namespace onescale;
  const std::map<std::string, int (*)(const Options&)> commands = {
      {"prepare", prepare_command},    {"train", train_command},   {"eval", eval_command},
      {"generate", generate_command},  {"export", export_command}, {"plan", plan_command},
      {"gradients", gradients_command}};
  try {
    const Parsed parsed = parse(argc, argv);
    if (!parsed.text.empty()) {
      std::fputs(parsed.text.c_str(), parsed.exit_code == 0 ? stdout : stderr);
      return parsed.exit_code;
    }
    const int code = commands.at(parsed.options.command)(parsed.options);
    check(std::fflush(stdout) == 0 && std::ferror(stdout) == 0,
          "standard output cannot be written; its reader is gone or the disk full");
    return code;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "onescale: %s\n", error.what());
    return 2;
  } catch (const std::bad_alloc&) {
    std::fputs("onescale: no memory left; a smaller micro_batch or seq_len, or recompute = block, needs less\n",
               stderr);
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "onescale: %s\n", error.what());
    return 1;
  }
}

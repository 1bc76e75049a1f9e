// `onescale export`: a Hugging Face directory, without the optimizer's state, in the dtype asked for.
#include <cstdio>
#include <filesystem>

#include "kernels/error.h"
#include "parallel/file.h"
#include "train/commands.h"
#include "train/session.h"

namespace onescale {

int export_command(const Options& options) {
  const ModelSource source(options.model);
  check_usage(!std::filesystem::exists(plain_path(options.out)), "out ", options.out,
              " exists; give a directory that does not");
  NewDirectory dir(options.out);
  const auto fetch = [&](const std::vector<std::int64_t>& wanted, float* out) {
    const auto i = static_cast<std::size_t>(wanted[0]);
    source.read(i, 0, source.table().parameters[i].numel(), out);
  };
  write_model(dir.path(), source.config(), source.table(), fetch,
              options.dtype == "bfloat16" ? FileType::BF16 : FileType::F32, *make_single_communicator("world"));
  if (const auto tokenizer = source.tokenizer()) write_text(dir.path() + "/tokenizer.model", tokenizer->model());
  dir.publish();
  std::printf("%s -> %s (%s)\n", source.dir().c_str(), options.out.c_str(), options.dtype.c_str());
  return 0;
}

}  // namespace onescale

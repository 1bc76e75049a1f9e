// `onescale export`: a Hugging Face directory, without the optimizer's state, in the dtype asked for.
#include <filesystem>

#include "kernels/error.h"
#include "model/file.h"
#include "train/commands.h"
#include "train/session.h"

namespace onescale {

int export_command(const Options& options) {
  namespace fs = std::filesystem;
  const ModelSource source(options.model);
  check_usage(!fs::exists(options.out), "out ", options.out, " exists; give a directory that does not");
  // Written beside its place and renamed, so that a kill leaves no half-written model under the name asked for.
  const std::string partial = options.out + ".partial";
  fs::remove_all(partial);
  fs::create_directories(partial);
  write_model(
      partial, source.config(), source.table(), [&](std::size_t i, float* out) { source.read(i, out); },
      options.dtype == "bfloat16" ? FileType::BF16 : FileType::F32);
  if (const auto tokenizer = source.tokenizer()) write_text(partial + "/tokenizer.model", tokenizer->model());
  sync_directory(partial);
  fs::rename(partial, options.out);
  const fs::path parent = fs::absolute(options.out).parent_path();
  sync_directory(parent.string());
  std::printf("%s -> %s (%s)\n", source.dir().c_str(), options.out.c_str(), options.dtype.c_str());
  return 0;
}

}  // namespace onescale

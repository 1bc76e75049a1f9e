// `onescale export`: a Hugging Face directory, without the optimizer's state, in the dtype asked for.
#include <filesystem>

#include "kernels/error.h"
#include "parallel/file.h"
#include "train/commands.h"
#include "train/session.h"

namespace onescale {

int export_command(const Options& options) {
  namespace fs = std::filesystem;
  const ModelSource source(options.model);
  std::string out = options.out;
  while (out.size() > 1 && out.back() == '/') out.pop_back();
  check_usage(!fs::exists(out), "out ", out, " exists; give a directory that does not");
  // Written beside its place and renamed, so that a kill leaves no half-written model under the name asked for.
  const std::string partial = out + ".partial";
  std::error_code error;
  fs::remove_all(partial, error);
  fs::create_directories(partial, error);
  check(!error, "out ", out, " cannot be made: ", error.message(), "; give a place that can be written");
  try {
    const auto fetch = [&](const std::vector<std::int64_t>& wanted, float* out) {
      const auto i = static_cast<std::size_t>(wanted[0]);
      source.read(i, 0, source.table().parameters[i].numel(), out);
    };
    write_model(partial, source.config(), source.table(), fetch,
                options.dtype == "bfloat16" ? FileType::BF16 : FileType::F32, *make_single_communicator("world"));
    if (const auto tokenizer = source.tokenizer()) write_text(partial + "/tokenizer.model", tokenizer->model());
    sync_directory(partial);
  } catch (...) {
    fs::remove_all(partial, error);
    throw;
  }
  fs::rename(partial, out);
  const fs::path parent = fs::absolute(out).parent_path();
  sync_directory(parent.string());
  std::printf("%s -> %s (%s)\n", source.dir().c_str(), out.c_str(), options.dtype.c_str());
  return 0;
}

}  // namespace onescale

#include "train/checkpoint.h"

#include <fcntl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <sstream>
#include <system_error>

#include "parallel/agreement.h"
#include "parallel/json.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

constexpr const char* temporary = ".tmp-";
constexpr std::int64_t format = 1;

std::string step_name(std::int64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "step-%08lld", static_cast<long long>(step));
  return text;
}

void check_system(const std::error_code& error, const fs::path& path, const char* what) {
  check(!error, path.string(), ": ", what, ": ", error.message());
}

// Every directory step-NNN by its step.
std::map<std::int64_t, fs::path> list_steps(const fs::path& root) {
  std::map<std::int64_t, fs::path> steps;
  std::error_code error;
  if (!fs::exists(root, error)) return steps;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::int64_t step = 0;
    const char* const last = name.data() + name.size();
    if (!name.starts_with("step-") || std::from_chars(name.data() + 5, last, step).ptr != last) continue;
    steps[step] = it->path();
  }
  check_system(error, root, "cannot be listed");
  return steps;
}

void remove_temporaries(const fs::path& root) {
  std::error_code error;
  std::vector<fs::path> stale;
  for (const fs::directory_entry& entry : fs::directory_iterator(root, error)) {
    if (entry.path().filename().string().starts_with(temporary)) stale.push_back(entry.path());
  }
  for (const fs::path& path : stale) {
    fs::remove_all(path, error);
    check_system(error, path, "is left by an interrupted save and cannot be removed");
  }
}

std::vector<StoredTensor> moment_tensors(const ParameterTable& table) {
  std::vector<StoredTensor> tensors;
  for (const char* moment : {"exp_avg.", "exp_avg_sq."}) {
    for (const Parameter& p : table.parameters) tensors.push_back({moment + p.name, FileType::F32, p.shape});
  }
  return tensors;
}

void check_free_space(const fs::path& root, const CheckpointContents& contents) {
  const double needed = 1e6 + static_cast<double>(contents.tokenizer.size()) +
                        static_cast<double>(file_bytes(model_tensors(contents.table, FileType::F32))) +
                        static_cast<double>(contents.exp_avg ? file_bytes(moment_tensors(contents.table)) : 0);
  struct statvfs status {};
  const bool known = statvfs(root.c_str(), &status) == 0;
  check(known, root.string(), ": its free space cannot be found: ", std::strerror(errno));
  const double free = static_cast<double>(status.f_bavail) * static_cast<double>(status.f_frsize);
  check(free >= needed, root.string(), ": ", free / 1e6, " MB are free, but the checkpoint of step ",
        contents.state.step, " needs ", needed / 1e6, " MB; free some space or lower keep_last");
}

Json state_json(const TrainerState& s) {
  Json json = Json::object(), options = Json::object();
  json.set("step", s.step);
  json.set("updates", s.updates);
  json.set("samples", s.samples);
  json.set("tokens_seen", s.tokens_seen);
  json.set("bad_steps", s.bad_steps);
  json.set("skipped_steps", s.skipped_steps);
  json.set("clipped_steps", s.clipped_steps);
  json.set("seconds", s.seconds);
  json.set("data_hash", s.data_hash);
  json.set("seed", std::to_string(s.seed));  // 64 bits unsigned
  for (const auto& [name, value] : s.options) options.set(name, value);
  json.set("options", options);
  return json;
}

TrainerState read_state(const Json& json) {
  TrainerState s;
  s.step = json.at("step").integer();
  s.updates = json.at("updates").integer();
  s.samples = json.at("samples").integer();
  s.tokens_seen = json.at("tokens_seen").integer();
  s.bad_steps = json.at("bad_steps").integer();
  s.skipped_steps = json.at("skipped_steps").integer();
  s.clipped_steps = json.at("clipped_steps").integer();
  s.seconds = json.at("seconds").number();
  s.data_hash = json.at("data_hash").string();
  const std::string seed = json.at("seed").string();
  std::from_chars(seed.data(), seed.data() + seed.size(), s.seed);
  const Json options = json.at("options");
  for (const std::string& name : options.keys()) s.options.emplace_back(name, options.at(name).string());
  return s;
}

// trainer.json: {"checksum": of the dump of "content", "content": {...}}.
void write_trainer_json(const fs::path& dir, const TrainerState& state,
                        const std::map<std::string, std::string>& checksums) {
  Json content = Json::object(), files = Json::object(), tensors = Json::object(), outer = Json::object();
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) {
    Json file = Json::object();
    file.set("bytes", static_cast<std::int64_t>(entry.file_size()));
    if (entry.path().extension() != ".safetensors") {  // those have a checksum per tensor
      const std::string text = read_text(entry.path().string());
      file.set("checksum", checksum(text.data(), text.size()));
    }
    files.set(entry.path().filename().string(), file);
  }
  for (const auto& [name, sum] : checksums) tensors.set(name, sum);
  content.set("format", format);
  content.set("state", state_json(state));
  content.set("files", files);
  content.set("tensors", tensors);
  const std::string text = content.dump();
  outer.set("checksum", checksum(text.data(), text.size()));
  outer.set("content", content);
  write_text((dir / "trainer.json").string(), outer.dump(2) + "\n");
}

// All tensors, by all ranks; the checksums of all of them on every rank.
std::map<std::string, std::string> write_files(const fs::path& dir, const CheckpointContents& c, Communicator& world) {
  std::map<std::string, std::string> mine, all;
  together(world, [&] { mine = write_model(dir.string(), c.config, c.table, c.weights, FileType::F32, world); });
  if (c.exp_avg) {
    const auto n = static_cast<std::int64_t>(c.table.parameters.size());
    const Gather moments = [&](const std::vector<std::int64_t>& wanted, float* out) {
      // Ranks may want tensors of both kinds in one turn.
      std::vector<std::int64_t> first = wanted, second = wanted;
      for (std::int64_t& i : first) i = i < n ? i : -1;
      for (std::int64_t& i : second) i = i < n ? -1 : i - n;
      const auto any = [](const std::vector<std::int64_t>& list) {
        return std::any_of(list.begin(), list.end(), [](std::int64_t i) { return i >= 0; });
      };
      if (any(first)) c.exp_avg(first, out);
      if (any(second)) c.exp_avg_sq(second, out);
    };
    together(world,
             [&] { mine.merge(write_tensors(dir.string(), "optimizer", moment_tensors(c.table), moments, world)); });
  }
  Json sums = Json::object();
  for (const auto& [name, sum] : mine) sums.set(name, sum);
  for (const std::string& text : exchange_text(world, sums.dump())) {
    const Json part = Json::parse(text, "a rank's checksums");
    for (const std::string& name : part.keys()) all[name] = part.at(name).string();
  }
  return all;
}

// `dir` takes the name `target`. What had that name before is exchanged in the same instant where the file system can
// do that.
void publish(const fs::path& dir, const fs::path& target) {
  if (fs::exists(target)) {
    if (renameat2(AT_FDCWD, dir.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
      fs::remove_all(dir);
      return;
    }
    const fs::path old = dir.string() + "-replaced";
    fs::rename(target, old);
    fs::rename(dir, target);
    fs::remove_all(old);
    return;
  }
  fs::rename(dir, target);
}

}  // namespace

std::string save_checkpoint(const std::string& run_dir, const CheckpointContents& contents, Communicator& world) {
  const fs::path root = fs::path(run_dir) / "checkpoints", target = root / step_name(contents.state.step);
  const fs::path dir = root / (temporary + step_name(contents.state.step));
  const auto cannot = [&](const std::exception& e) { return str(target.string(), ": cannot be saved: ", e.what()); };
  const auto with_root = [&](const std::function<void()>& work) {
    on_root(world, [&] {
      try {
        work();
      } catch (const fs::filesystem_error& e) {
        throw Error(cannot(e));
      }
    });
  };
  try {
    with_root([&] {
      if (fs::create_directories(root)) sync_directory(run_dir);
      remove_temporaries(root);
      check_free_space(root, contents);
      fs::create_directory(dir);
    });
    const std::map<std::string, std::string> checksums = write_files(dir, contents, world);
    with_root([&] {
      if (!contents.tokenizer.empty()) write_text((dir / "tokenizer.model").string(), contents.tokenizer);
      write_trainer_json(dir, contents.state, checksums);
      sync_directory(dir.string());
      publish(dir, target);
      sync_directory(root.string());
    });
  } catch (...) {
    std::error_code ignored;
    if (world.rank() == 0) fs::remove_all(dir, ignored);
    throw;
  }
  return target.string();
}

std::vector<std::string> prune_checkpoints(const std::string& run_dir, std::int64_t step, std::int64_t keep_last,
                                           std::int64_t keep_every) {
  const fs::path root = fs::path(run_dir) / "checkpoints";
  const auto steps = list_steps(root);
  std::vector<std::string> failures;
  std::int64_t kept = 1;
  for (auto it = steps.rbegin(); it != steps.rend(); ++it) {
    if (it->first >= step || ++kept <= keep_last || (keep_every > 0 && it->first % keep_every == 0)) continue;
    // Renamed first: a directory that is removed file by file never looks like a checkpoint.
    const fs::path doomed = root / (temporary + step_name(it->first));
    std::error_code error;
    fs::rename(it->second, doomed, error);
    if (!error) fs::remove_all(doomed, error);
    if (error) failures.push_back(str(it->second.string(), ": cannot be removed: ", error.message()));
  }
  return failures;
}

Checkpoint::Checkpoint(const std::string& path) : path_(path) {
  const std::string name = path + "/trainer.json", text = read_text(name);
  try {
    const Json outer = Json::parse(text, name), content = outer.at("content");
    const std::string dump = content.dump(), sum = checksum(dump.data(), dump.size());
    check(sum == outer.at("checksum").string(), name, ": its checksum is ", sum,
          ", not the one it holds; the file was changed");
    check(content.at("format").integer() == format, name, ": is of format ", content.at("format").integer(),
          ", this program reads ", format);
    state_ = read_state(content.at("state"));
    const Json files = content.at("files"), tensors = content.at("tensors");
    for (const std::string& tensor : tensors.keys()) checksums_[tensor] = tensors.at(tensor).string();
    for (const std::string& file : files.keys()) {
      const std::string where = str(path, "/", file);
      const std::int64_t expected = files.at(file).at("bytes").integer(), bytes = File::open(where).size();
      check_contents(bytes == expected, where, ": has ", bytes, " bytes instead of ", expected);
      if (!files.at(file).has("checksum")) continue;
      const std::string contents = read_text(where);
      check_contents(checksum(contents.data(), contents.size()) == files.at(file).at("checksum").string(), where,
                     ": its checksum is wrong; the file was changed");
    }
  } catch (const UnreadableFile&) {
    throw;
  } catch (const Error& e) {
    throw DamagedFile(e.what());
  }
  config_ = read_config(path);
  table_ = gpt_bigcode_table(config_);
  model_.emplace(path, config_, table_);
  if (checksums_.size() == table_.parameters.size()) return;
  moments_.emplace(path, "optimizer");
  for (const StoredTensor& wanted : moment_tensors(table_)) {
    const StoredTensor& tensor = moments_->at(wanted.name);
    check_contents(tensor.shape == wanted.shape, moments_->path(tensor), ": holds ", tensor.describe(), " for ",
                   wanted.describe());
  }
}

void Checkpoint::verify(std::int64_t part, std::int64_t parts) const {
  std::int64_t index = 0;
  for (const auto& [name, expected] : checksums_) {
    if (index++ % parts != part) continue;
    const SafetensorsReader& files = name.starts_with("exp_avg") ? *moments_ : model_->files();
    const StoredTensor& tensor = files.at(name);
    const std::string sum = files.checksum(tensor);
    check_contents(sum == expected, files.path(tensor), ": tensor ", name, " has the checksum ", sum, " instead of ",
                   expected);
  }
}

void Checkpoint::read_weights(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const {
  model_->read(parameter, first, count, out);
}

void Checkpoint::read_moment(const char* prefix, std::size_t parameter, std::int64_t first, std::int64_t count,
                             float* out) const {
  check(has_moments(), path_, ": holds no optimizer state; it was saved by a run with another optimizer");
  moments_->read(moments_->at(prefix + table_.parameters.at(parameter).name), first, count, out);
}

void Checkpoint::read_exp_avg(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const {
  read_moment("exp_avg.", parameter, first, count, out);
}

void Checkpoint::read_exp_avg_sq(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const {
  read_moment("exp_avg_sq.", parameter, first, count, out);
}

std::string Checkpoint::tokenizer() const {
  const std::string name = path_ + "/tokenizer.model";
  std::error_code ignored;
  return fs::exists(name, ignored) ? read_text(name) : "";
}

FoundCheckpoint find_checkpoint(const std::string& run_dir, Communicator& world) {
  std::string names;
  on_root(world, [&] {
    for (const auto& [step, path] : list_steps(fs::path(run_dir) / "checkpoints")) names += path.string() + "\n";
  });
  std::vector<std::string> paths;
  std::istringstream lines(exchange_text(world, names)[0]);
  for (std::string path; std::getline(lines, path);) paths.push_back(path);

  FoundCheckpoint found;
  for (auto path = paths.rbegin(); path != paths.rend(); ++path) {
    std::string damage;
    together(world, [&] {
      try {
        found.checkpoint.emplace(*path);
        found.checkpoint->verify(world.rank(), world.size());
      } catch (const DamagedFile& e) {
        damage = e.what();
      }
    });
    const std::vector<std::string> said = exchange_text(world, damage);
    const auto first = std::find_if(said.begin(), said.end(), [](const std::string& text) { return !text.empty(); });
    if (first == said.end()) {
      for (std::string& warning : found.warnings) warning += "; " + *path + " is used instead";
      return found;
    }
    found.checkpoint.reset();
    found.warnings.push_back(str(*path, " is damaged: ", *first));
  }
  check(paths.empty(), run_dir, ": none of its ", paths.size(), " checkpoints can be used (",
        found.warnings.empty() ? "" : found.warnings.front(), "); restore one, or move ", run_dir,
        "/checkpoints away to start afresh");
  return found;
}

}  // namespace onescale

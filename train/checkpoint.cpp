#include "train/checkpoint.h"

#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "model/parameters.h"
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

// Every directory step-NNN by its step.
std::map<std::int64_t, fs::path> list_steps(const fs::path& root) {
  std::map<std::int64_t, fs::path> steps;
  if (!fs::exists(root)) return steps;
  for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
    const std::string name = entry.path().filename().string();
    std::int64_t step = 0;
    const char* const last = name.data() + name.size();
    if (name.starts_with("step-") && std::from_chars(name.data() + 5, last, step).ptr == last)
      steps[step] = entry.path();
  }
  return steps;
}

// What interrupted saves have left.
void remove_temporaries(const fs::path& root) {
  std::vector<fs::path> stale;
  for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
    if (entry.path().filename().string().starts_with(temporary)) stale.push_back(entry.path());
  }
  for (const fs::path& path : stale) fs::remove_all(path);
}

std::vector<StoredTensor> moment_tensors(const ParameterTable& table) {
  std::vector<StoredTensor> tensors;
  for (const char* moment : {"exp_avg.", "exp_avg_sq."}) {
    for (const Parameter& p : table.parameters) tensors.push_back({moment + p.name, FileType::F32, p.shape});
  }
  return tensors;
}

void check_free_space(const fs::path& root, const CheckpointContents& contents, const ParameterTable& table,
                      const std::function<void()>& make_room) {
  std::int64_t bytes = 1'000'000 + std::ssize(contents.tokenizer) + file_bytes(model_tensors(table, FileType::F32));
  if (!contents.moments.empty()) bytes += file_bytes(moment_tensors(table));
  const auto available = [&] { return static_cast<double>(fs::space(root).available); };
  const double needed = static_cast<double>(bytes);
  if (available() < needed) make_room();
  check(available() >= needed, root.string(), ": ", available() / 1e6, " MB are free, but the checkpoint of step ",
        contents.state.step, " needs ", needed / 1e6, " MB; free some space",
        list_steps(root).size() > 1 ? " or keep fewer (keep_last, keep_every)" : "");
}

constexpr std::pair<const char*, std::int64_t TrainerState::*> counts[] = {
    {"step", &TrainerState::step},
    {"samples", &TrainerState::samples},
    {"bad_steps", &TrainerState::bad_steps},
    {"skipped_steps", &TrainerState::skipped_steps},
    {"clipped_steps", &TrainerState::clipped_steps}};

// An object of texts.
template <class Texts>
Json texts_json(const Texts& texts) {
  Json json = Json::object();
  for (const auto& [name, value] : texts) json.set(name, value);
  return json;
}

Json state_json(const TrainerState& s) {
  Json json = Json::object();
  for (const auto& [name, member] : counts) json.set(name, s.*member);
  json.set("seconds", s.seconds);
  json.set("data_hash", s.data_hash);
  json.set("options", texts_json(s.options));
  return json;
}

TrainerState read_state(const Json& json) {
  TrainerState s;
  for (const auto& [name, member] : counts) s.*member = json.at(name).integer();
  s.seconds = json.at("seconds").number();
  s.data_hash = json.at("data_hash").string();
  for (const auto& [name, value] : json.at("options").items()) s.options.emplace_back(name, value.string());
  return s;
}

// trainer.json: {"checksum": of the dump of "content", "content": {...}}.
void write_trainer_json(const fs::path& dir, const TrainerState& state,
                        const std::map<std::string, std::string>& checksums) {
  Json content = Json::object(), files = Json::object(), outer = Json::object();
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) {
    Json file = Json::object();
    file.set("bytes", static_cast<std::int64_t>(entry.file_size()));
    if (entry.path().extension() != ".safetensors") {  // those have a checksum per tensor
      const std::string text = read_text(entry.path().string());
      file.set("checksum", checksum(text.data(), text.size()));
    }
    files.set(entry.path().filename().string(), file);
  }
  content.set("format", format);
  content.set("state", state_json(state));
  content.set("files", files);
  content.set("tensors", texts_json(checksums));
  const std::string text = content.dump();
  outer.set("checksum", checksum(text.data(), text.size()));
  outer.set("content", content);
  write_text((dir / "trainer.json").string(), outer.dump(2) + "\n");
}

// All tensors, by all ranks; the checksums of all of them on every rank.
std::map<std::string, std::string> write_files(const fs::path& dir, const CheckpointContents& c,
                                               const ParameterTable& table, Communicator& world) {
  std::map<std::string, std::string> mine, all;
  const Gather moments = [&](const std::vector<std::int64_t>& wanted, float* out) {
    const std::int64_t n = std::ssize(table.parameters);
    for (std::int64_t kind = 0; kind < 2; ++kind) {  // ranks may want tensors of both in one turn
      std::vector<std::int64_t> these = wanted;
      for (std::int64_t& i : these) i = i >= 0 && i / n == kind ? i % n : -1;
      if (*std::max_element(these.begin(), these.end()) >= 0) c.moments[static_cast<std::size_t>(kind)](these, out);
    }
  };
  together(world, [&] { mine = write_model(dir.string(), c.config, table, c.weights, FileType::F32, world); });
  together(world, [&] {
    if (!c.moments.empty()) mine.merge(write_tensors(dir.string(), "optimizer", moment_tensors(table), moments, world));
  });
  for (const std::string& text : exchange_text(world, texts_json(mine).dump())) {
    for (const auto& [name, sum] : Json::parse(text, "a rank's checksums").items()) all[name] = sum.string();
  }
  return all;
}

// `dir` takes the name `target`. What had that name before is exchanged in the same instant where the file system can
// do that.
void publish(const fs::path& dir, const fs::path& target) {
  fs::path old = dir;
  if (renameat2(AT_FDCWD, dir.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
    old += "-replaced";
    if (fs::exists(target)) fs::rename(target, old);
    fs::rename(dir, target);
  }
  fs::remove_all(old);
}

}  // namespace

std::string save_checkpoint(const std::string& run_dir, const CheckpointContents& contents, Communicator& world,
                            const std::function<void()>& make_room) {
  const fs::path root = fs::path(run_dir) / "checkpoints", target = root / step_name(contents.state.step);
  const fs::path dir = root / (temporary + step_name(contents.state.step));
  const ParameterTable table = gpt_bigcode_table(contents.config);
  const auto with_root = [&](const auto& work) {
    on_root(world, [&] {
      try {
        work();
      } catch (const fs::filesystem_error& e) {
        throw Error(str(target.string(), ": cannot be saved: ", e.what()));
      }
    });
  };
  try {
    with_root([&] {
      if (fs::create_directory(root)) sync_directory(run_dir);
      remove_temporaries(root);
      check_free_space(root, contents, table, make_room);
      fs::create_directory(dir);
    });
    const std::map<std::string, std::string> checksums = write_files(dir, contents, table, world);
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
  try {
    remove_temporaries(root);
  } catch (const fs::filesystem_error& e) {
    failures.push_back(brief(e.what()));
  }
  std::int64_t kept = 1;
  for (auto it = steps.rbegin(); it != steps.rend(); ++it) {
    if (it->first >= step || ++kept <= keep_last || (keep_every > 0 && it->first % keep_every == 0)) continue;
    // Renamed first: a directory that is removed file by file never looks like a checkpoint.
    const fs::path doomed = root / (temporary + step_name(it->first));
    std::error_code error;
    fs::rename(it->second, doomed, error);
    if (!error) fs::remove_all(doomed, error);
    if (error) failures.push_back(brief(it->second.string(), ": cannot be removed: ", error.message()));
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
    for (const auto& [tensor, wanted] : content.at("tensors").items()) checksums_[tensor] = wanted.string();
    for (const auto& [file, wanted] : content.at("files").items()) {
      const std::string where = str(path, "/", file);
      const std::int64_t expected = wanted.at("bytes").integer(), bytes = File::open(where).size();
      check_contents(bytes == expected, where, ": has ", bytes, " bytes instead of ", expected);
      if (!wanted.has("checksum")) continue;
      const std::string contents = read_text(where);
      check_contents(checksum(contents.data(), contents.size()) == wanted.at("checksum").string(), where,
                     ": its checksum is wrong; the file was changed");
    }
  } catch (const UnreadableFile&) {
    throw;
  } catch (const Error& e) {
    throw DamagedFile(e.what());
  }
  table_ = gpt_bigcode_table(read_config(path));
  std::vector<StoredTensor> expected = model_tensors(table_, FileType::F32);
  model_.emplace(path, "model");
  if (checksums_.size() > expected.size()) {
    moments_.emplace(path, "optimizer");
    for (StoredTensor& moment : moment_tensors(table_)) expected.push_back(std::move(moment));
  }
  for (const StoredTensor& wanted : expected) {
    const SafetensorsReader& reader = files(wanted.name);
    const StoredTensor& found = reader.at(wanted.name);
    check_contents(found.type == wanted.type && found.shape == wanted.shape, reader.path(found), ": holds ",
                   found.describe(), " for ", wanted.describe());
  }
}

void Checkpoint::verify(std::int64_t part, std::int64_t parts) const {
  std::int64_t index = 0;
  for (const auto& [name, expected] : checksums_) {
    if (index++ % parts != part) continue;
    const StoredTensor& stored = files(name).at(name);
    const std::string sum = files(name).checksum(stored);
    check_contents(sum == expected, files(name).path(stored), ": tensor ", name, " has the checksum ", sum,
                   " instead of ", expected);
  }
}

FetchRange Checkpoint::values(const std::string& prefix) const {
  check(prefix.empty() || has_moments(), path_,
        ": holds no optimizer state; it was saved by a run with another optimizer");
  return [this, prefix](std::size_t parameter, std::int64_t first, std::int64_t count, float* out) {
    const std::string name = prefix + table_.parameters.at(parameter).name;
    files(name).read(files(name).at(name), first, count, out);
  };
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
    found.warnings.push_back(brief(fs::path(*path).filename().string(), " is damaged: ", *first));
  }
  check(paths.empty(), run_dir, ": none of its ", paths.size(), " checkpoints can be used (",
        found.warnings.empty() ? "" : found.warnings.front(),
        "); restore one, or move checkpoints away from there to start afresh");
  return found;
}

}  // namespace onescale

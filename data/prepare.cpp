#include "data/prepare.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

#include "data/encoder.h"
#include "kernels/error.h"
#include "parallel/json.h"

namespace onescale {
namespace fs = std::filesystem;
namespace {

// Of a file or a directory, so that what was written survives a loss of power.
void sync(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool ok = file >= 0 && ::fsync(file) == 0;
  check(ok, path, ": writing failed (", std::strerror(errno), ").");
  ::close(file);
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes << std::flush;
  check(file.good(), path, ": writing failed (", std::strerror(errno), ").");
  sync(path);
}

Json settings_of(const PrepareOptions& options, const Documents& documents, const std::optional<Tokenizer>& tokenizer) {
  Json settings = Json::object();
  const auto list = [&](const char* name, const std::vector<std::string>& values) {
    Json array = Json::array();
    for (const std::string& value : values) array.push(value);
    settings.set(name, array);
  };
  list("inputs", options.inputs);
  list("patterns", options.patterns);
  settings.set("files", documents.files());
  settings.set("input_bytes", documents.bytes());
  settings.set("names_and_sizes", documents.fingerprint());
  if (tokenizer) {
    settings.set("tokenizer", options.tokenizer);
    list("tokenizer_hash",
         {str(tokenizer->hash()[0]), str(tokenizer->hash()[1]), str(tokenizer->hash()[2]), str(tokenizer->hash()[3])});
  } else {
    settings.set("vocab_size", options.vocab_size);
    settings.set("tokenizer_bytes", options.tokenizer_bytes);
  }
  settings.set("val_share", options.validation_share);
  settings.set("fim_rate", options.fim.fim);
  settings.set("fim_spm_rate", options.fim.spm);
  settings.set("seed", str(options.seed));
  settings.set("shard_tokens", options.shard_tokens);
  return settings;
}

Json to_json(const SplitSummary& split) {
  Json json = Json::object();
  json.set("documents", split.documents);
  json.set("bytes", split.bytes);
  json.set("tokens", split.tokens);
  json.set("fim_psm", split.psm);
  json.set("fim_spm", split.spm);
  json.set("shards", split.shards);
  return json;
}

SplitSummary split_from_json(const Json& json) {
  return {json.at("documents").integer(), json.at("bytes").integer(),   json.at("tokens").integer(),
          json.at("fim_psm").integer(),   json.at("fim_spm").integer(), json.at("shards").integer()};
}

// Throws when `out` exists and was not made from these settings; true when it was.
bool made_before(const std::string& out, const Json& settings) {
  std::error_code error;
  if (!fs::exists(out, error) || fs::is_empty(out, error)) return false;
  const std::string file = out + "/prepare.json";
  check_usage(fs::exists(file, error), out, " exists and is not a prepared data set: name another directory.");
  const Json before = Json::read_file(file).at("settings");
  for (const std::string& key : settings.keys()) {
    const std::string old = before.has(key) ? before.at(key).dump() : "absent", now = settings.at(key).dump();
    check_usage(old == now, out, " exists and was made with ", key, " ", old, ", not ", now,
                ": name another directory or remove it.");
  }
  return true;
}

}  // namespace

PrepareSummary read_prepare_summary(const std::string& dir) {
  const Json json = Json::read_file(dir + "/prepare.json");
  PrepareSummary summary;
  summary.train = split_from_json(json.at("train"));
  summary.val = split_from_json(json.at("val"));
  summary.vocab_size = json.at("vocab_size").integer();
  return summary;
}

PrepareSummary prepare(const PrepareOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const auto share = [](const char* name, double value, double most) {
    check_usage(value >= 0 && value <= most, name, " is ", value, " but must lie between 0 and ", most, ".");
  };
  share("val_share", options.validation_share, 0.99);
  share("fim_rate", options.fim.fim, 1);
  share("fim_spm_rate", options.fim.spm, 1);
  check_usage(!options.out.empty(), "No output directory was given.");
  check_usage(options.shard_tokens > 0, "shard_tokens is ", options.shard_tokens, " but must be positive.");
  Documents documents(options.inputs, options.patterns);
  std::optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty()) tokenizer = Tokenizer::load(options.tokenizer);

  const std::string out = fs::path(options.out + "/").lexically_normal().parent_path().string();
  const Json settings = settings_of(options, documents, tokenizer);
  if (made_before(out, settings)) {
    PrepareSummary summary = read_prepare_summary(out);
    summary.reused = true;
    return summary;
  }

  const std::string partial = out + ".partial";
  std::error_code error;
  fs::remove_all(partial, error);
  fs::create_directories(partial, error);
  check(!error, partial, ": the directory cannot be made (", error.message(), ").");
  try {
    DocumentEncoder encoder(options, documents);
    if (!tokenizer) tokenizer = Tokenizer::parse(encoder.train_tokenizer(), "the trained tokenizer");
    const Vocabulary vocabulary{tokenizer->vocab_size(), tokenizer->eot(), tokenizer->hash()};
    SplitWriter train(partial + "/train_", vocabulary, options.shard_tokens);
    SplitWriter val(partial + "/val_", vocabulary, options.shard_tokens);
    encoder.encode(*tokenizer, train, val);
    check(train.summary.documents > 0, "All ", val.summary.documents,
          " documents fell to validation: lower val_share, change seed or add documents.");

    PrepareSummary summary;
    summary.train = train.summary;
    summary.val = val.summary;
    summary.vocab_size = vocabulary.size;
    Json json = Json::object();
    json.set("settings", settings);
    json.set("vocab_size", vocabulary.size);
    json.set("byte_exact", tokenizer->lossless());
    json.set("train", to_json(summary.train));
    json.set("val", to_json(summary.val));
    write_file(partial + "/tokenizer.model", tokenizer->model());
    write_file(partial + "/prepare.json", json.dump(2) + "\n");
    sync(partial);
    fs::rename(partial, out, error);
    check(!error, out, ": the finished directory ", partial, " cannot be renamed (", error.message(), ").");
    sync(fs::absolute(out).parent_path().string());
    summary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return summary;
  } catch (...) {
    fs::remove_all(partial, error);
    throw;
  }
}

}  // namespace onescale

#include "data/prepare.h"

#include <chrono>
#include <filesystem>
#include <optional>

#include "data/encoder.h"
#include "kernels/error.h"
#include "parallel/file.h"
#include "parallel/json.h"

namespace onescale {
namespace fs = std::filesystem;
namespace {

Json list_of(const std::vector<std::string>& values) {
  Json array = Json::array();
  for (const std::string& value : values) array.push(value);
  return array;
}

Json settings_of(const PrepareOptions& options, const Documents& documents, const std::optional<Tokenizer>& tokenizer) {
  Json settings = Json::object();
  settings.set("inputs", list_of(options.inputs));
  settings.set("patterns", list_of(options.patterns));
  settings.set("files", documents.files());
  settings.set("input_bytes", documents.bytes());
  settings.set("input_hash", documents.fingerprint());
  if (tokenizer) {
    const auto& hash = tokenizer->hash();
    settings.set("tokenizer", options.tokenizer);
    settings.set("tokenizer_hash", list_of({str(hash[0]), str(hash[1]), str(hash[2]), str(hash[3])}));
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

constexpr std::pair<const char*, std::int64_t SplitSummary::*> split_fields[] = {
    {"documents", &SplitSummary::documents}, {"bytes", &SplitSummary::bytes}, {"tokens", &SplitSummary::tokens},
    {"fim_psm", &SplitSummary::psm},         {"fim_spm", &SplitSummary::spm}, {"shards", &SplitSummary::shards}};

Json to_json(const SplitSummary& split) {
  Json json = Json::object();
  for (const auto& [name, field] : split_fields) json.set(name, split.*field);
  return json;
}

SplitSummary split_from_json(const Json& json) {
  SplitSummary split;
  for (const auto& [name, field] : split_fields) split.*field = json.at(name).integer();
  return split;
}

// What `out` holds already, if it was made with these settings; nothing if it is free. Throws otherwise.
std::optional<PrepareSummary> made_before(const std::string& out, const Json& settings) {
  std::error_code error;
  if (!fs::exists(out, error) || fs::is_empty(out, error)) return std::nullopt;
  const std::string file = out + "/prepare.json";
  check_usage(fs::exists(file, error), out, " exists and is not a prepared data set: name another directory.");
  const Json made = Json::read_file(file), before = made.at("settings");
  for (const std::string& key : settings.keys()) {
    const std::string old = before.has(key) ? before.at(key).dump() : "absent", now = settings.at(key).dump();
    check_usage(old == now, out, " exists and was made with ", key, " ", old, ", not ", now,
                ": name another directory or remove it.");
  }
  return PrepareSummary{split_from_json(made.at("train")), split_from_json(made.at("val")),
                        made.at("vocab_size").integer(), true};
}

}  // namespace

PrepareSummary prepare(const PrepareOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const auto share = [](const char* name, double value, double most) {
    check_usage(value >= 0 && value <= most, name, " is ", value, " but must lie between 0 and ", most, ".");
  };
  share("val_share", options.validation_share, 0.99);
  share("fim_rate", options.fim.fim, 1);
  share("fim_spm_rate", options.fim.spm, 1);
  check_usage(!options.out.empty(), "No output directory was given: name one with out.");
  check_usage(options.shard_tokens > 0, "shard_tokens is ", options.shard_tokens, " but must be positive.");
  Documents documents(options.inputs, options.patterns);
  std::optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty()) tokenizer = Tokenizer::load(options.tokenizer);
  const Json settings = settings_of(options, documents, tokenizer);
  const std::string out = plain_path(options.out);
  if (const auto before = made_before(out, settings)) return *before;

  NewDirectory dir(out);
  if (!tokenizer) tokenizer = Tokenizer::parse(train_tokenizer(options, documents), "the trained tokenizer");
  PrepareSummary summary = encode_documents(options, documents, *tokenizer, dir.path());
  Json json = Json::object();
  json.set("settings", settings);
  json.set("vocab_size", summary.vocab_size);
  json.set("byte_exact", tokenizer->lossless());
  json.set("train", to_json(summary.train));
  json.set("val", to_json(summary.val));
  write_text(dir.path() + "/tokenizer.model", tokenizer->model());
  write_text(dir.path() + "/prepare.json", json.dump(2) + "\n");
  dir.publish();
  summary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return summary;
}

}  // namespace onescale

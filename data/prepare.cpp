#include "data/prepare.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "data/documents.h"
#include "data/shard.h"
#include "kernels/error.h"
#include "parallel/json.h"

namespace onescale {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t group_bytes =
    4 << 20;  // of text in memory at a time: many tasks for the threads, and frequent progress
constexpr std::size_t task_bytes = 64 << 10;  // long documents are encoded in several tasks

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Runs work(0) .. work(n - 1), each once, on some of the threads. The exception of the lowest failed number is thrown
// at the end.
template <class Work>
void parallel_for(std::size_t n, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::size_t failed = n;
  std::exception_ptr exception;
  const auto run = [&] {
    for (std::size_t i; (i = next.fetch_add(1)) < n;) {
      try {
        work(i);
      } catch (...) {
        const std::scoped_lock lock(mutex);
        if (i < failed) failed = i, exception = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> workers;
    for (int t = 1; t < threads; ++t) workers.emplace_back(run);
    run();
  }
  if (exception) std::rethrow_exception(exception);
}

void sync_directory(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return;  // the rename holds without it, only not through a loss of power
  ::fsync(file);
  ::close(file);
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes << std::flush;
  check(file.good(), path, ": writing failed (", std::strerror(errno), ").");
}

bool is_validation(const PrepareOptions& options, std::int64_t number) {
  const Philox draw = document_draw(options.seed, number, DocumentDraw::split);
  return static_cast<double>(draw[0]) < options.validation_share * 4294967296.0;
}

// The shards of one split.
class SplitWriter {
 public:
  SplitWriter(std::string prefix, const Vocabulary& vocabulary, std::int64_t shard_tokens)
      : prefix_(std::move(prefix)), vocabulary_(vocabulary), shard_tokens_(shard_tokens) {}

  void add(const std::vector<std::int32_t>& ids, const std::vector<std::uint8_t>& no_target, std::size_t bytes) {
    if (!shard_) {
      char number[16];
      std::snprintf(number, sizeof number, "%06d", static_cast<int>(summary.shards++));
      shard_ = std::make_unique<ShardWriter>(prefix_ + number + ".bin", vocabulary_);
    }
    shard_->add_document(ids, no_target);
    ++summary.documents;
    summary.bytes += static_cast<std::int64_t>(bytes);
    summary.tokens += std::ssize(ids);
    if (shard_->tokens() >= shard_tokens_) finish();
  }
  void finish() {
    if (shard_) shard_->finish();
    shard_.reset();
  }

  SplitSummary summary;

 private:
  std::string prefix_;
  Vocabulary vocabulary_;
  std::int64_t shard_tokens_;
  std::unique_ptr<ShardWriter> shard_;
};

class Preparation {
 public:
  Preparation(const PrepareOptions& options, Documents& documents, int threads)
      : options_(options), documents_(documents), threads_(threads) {}

  std::string train_tokenizer() {
    WordCounts words;
    const double share = static_cast<double>(options_.tokenizer_bytes) / static_cast<double>(documents_.bytes());
    begin("reading words");
    Document document;
    for (std::int64_t number = 0; documents_.next(document); ++number) {
      const Philox draw = document_draw(options_.seed, number, DocumentDraw::split);
      if (is_validation(options_, number) || static_cast<double>(draw[1]) >= share * 4294967296.0) continue;
      words.add(document.text);
      report(0);
    }
    begin("training the tokenizer");
    report(0);
    return Tokenizer::train(words, options_.vocab_size);
  }

  void encode(const Tokenizer& tokenizer, SplitWriter& train, SplitWriter& val) {
    begin("encoding");
    std::vector<Document> group;
    for (std::int64_t first = 0;; first += std::ssize(group)) {
      group.clear();
      std::size_t bytes = 0;
      for (Document document; bytes < group_bytes && documents_.next(document);) {
        bytes += document.text.size();
        group.push_back(std::move(document));
      }
      if (group.empty()) break;
      encode_group(group, first, tokenizer, train, val);
      report(train.summary.tokens + val.summary.tokens);
    }
    train.finish();
    val.finish();
  }

 private:
  // A stretch of a document: a special id, or text that becomes ids.
  struct Part {
    std::size_t document;
    std::string_view text;
    bool no_target;
    std::vector<std::int32_t> ids;
  };

  void begin(const char* phase) {
    progress_ = {phase, 0, documents_.bytes(), 0, 0};
    begin_ = Clock::now();
    documents_.rewind();
  }

  void report(std::int64_t tokens) {
    if (!options_.progress) return;
    progress_.bytes = documents_.bytes_read();
    progress_.tokens = tokens;
    progress_.seconds = since(begin_);
    options_.progress(progress_);
  }

  void encode_group(const std::vector<Document>& group, std::int64_t first, const Tokenizer& tokenizer,
                    SplitWriter& train, SplitWriter& val) {
    std::vector<Part> parts;
    const auto add_text = [&](std::size_t document, std::string_view text, bool no_target) {
      while (!text.empty()) {
        const std::size_t end = tokenizer.next_cut(text, task_bytes);
        parts.push_back({document, text.substr(0, end), no_target, {}});
        text.remove_prefix(end);
      }
    };
    for (std::size_t d = 0; d < group.size(); ++d) {
      const std::string_view text = group[d].text;
      const std::int64_t number = first + static_cast<std::int64_t>(d);
      parts.push_back({d, {}, false, {tokenizer.eot()}});
      if (group[d].prompt_bytes > 0) {
        add_text(d, text.substr(0, group[d].prompt_bytes), true);
        add_text(d, text.substr(group[d].prompt_bytes), false);
      } else if (is_validation(options_, number)) {
        add_text(d, text, false);
      } else {
        const FimParts fim = fim_split(text, options_.fim, options_.seed, number);
        train.summary.psm += fim.mode == FimMode::psm;
        train.summary.spm += fim.mode == FimMode::spm;
        for (const FimSegment& segment : fim_segments(fim, tokenizer)) {
          if (segment.id >= 0) parts.push_back({d, {}, false, {segment.id}});
          add_text(d, segment.text, false);
        }
      }
    }
    parallel_for(parts.size(), threads_, [&](std::size_t i) {
      if (parts[i].text.empty()) return;
      parts[i].ids = tokenizer.encode(parts[i].text);
      check(tokenizer.lossless() || tokenizer.decode(parts[i].ids) == parts[i].text, group[parts[i].document].source,
            ": the tokenizer changes this text (such models lose U+2581 and bytes that are not UTF-8): leave the "
            "document out, or let "
            "prepare train a tokenizer.");
    });
    std::vector<std::int32_t> ids;
    std::vector<std::uint8_t> no_target;
    for (std::size_t i = 0; i < parts.size();) {
      const std::size_t d = parts[i].document;
      ids.clear();
      no_target.clear();
      for (; i < parts.size() && parts[i].document == d; ++i) {
        ids.insert(ids.end(), parts[i].ids.begin(), parts[i].ids.end());
        if (group[d].prompt_bytes > 0) no_target.resize(ids.size(), parts[i].no_target ? 1 : 0);
      }
      (is_validation(options_, first + static_cast<std::int64_t>(d)) ? val : train)
          .add(ids, no_target, group[d].text.size());
    }
  }

  const PrepareOptions& options_;
  Documents& documents_;
  int threads_;
  PrepareProgress progress_{};
  Clock::time_point begin_;
};

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
  settings.set("validation_share", options.validation_share);
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
  const Clock::time_point begin = Clock::now();
  const auto share = [](const char* name, double value, double most) {
    check_usage(value >= 0 && value <= most, name, " is ", value, " but must lie between 0 and ", most, ".");
  };
  share("validation_share", options.validation_share, 0.99);
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
    const int threads =
        options.threads > 0 ? options.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    Preparation preparation(options, documents, threads);
    if (!tokenizer) tokenizer = Tokenizer::parse(preparation.train_tokenizer(), "the trained tokenizer");
    const Vocabulary vocabulary{tokenizer->vocab_size(), tokenizer->eot(), tokenizer->hash()};
    SplitWriter train(partial + "/train_", vocabulary, options.shard_tokens);
    SplitWriter val(partial + "/val_", vocabulary, options.shard_tokens);
    preparation.encode(*tokenizer, train, val);
    check(train.summary.documents > 0, "All ", val.summary.documents,
          " documents fell to validation: lower validation_share, change seed or add documents.");

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
    sync_directory(partial);
    fs::rename(partial, out, error);
    check(!error, out, ": the finished directory ", partial, " cannot be renamed (", error.message(), ").");
    sync_directory(fs::absolute(out).parent_path().string());
    summary.seconds = since(begin);
    return summary;
  } catch (...) {
    fs::remove_all(partial, error);
    throw;
  }
}

}  // namespace onescale

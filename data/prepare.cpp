#include "data/prepare.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <future>
#include <iomanip>
#include <optional>
#include <utility>

#include "data/documents.h"
#include "data/shard.h"
#include "kernels/device.h"
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

// All that decides what is written; where the inputs lie does not.
Json settings_of(const PrepareOptions& options, const Documents& documents, const std::optional<Tokenizer>& tokenizer) {
  Json settings = Json::object();
  settings.set("files", documents.files());
  settings.set("input_bytes", documents.bytes());
  settings.set("input_hash", documents.fingerprint());
  if (tokenizer) {
    const auto& hash = tokenizer->hash();
    settings.set("tokenizer_hash", list_of({str(hash[0]), str(hash[1]), str(hash[2]), str(hash[3])}));
  } else {
    settings.set("vocab_size", options.vocab_size);
    settings.set("tokenizer_bytes", options.tokenizer_bytes);
  }
  settings.set("val_share", options.validation_share);
  settings.set("fim_rate", options.fim.fim);
  settings.set("fim_spm_rate", options.fim.spm);
  settings.set("fim_bytes", options.fim_bytes);
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
  for (const auto& [key, value] : settings.items()) {
    const std::string old = before.has(key) ? before.at(key).dump() : "absent", now = value.dump();
    check_usage(old == now, out, " exists and was made with ", key, " ", old, ", not ", now,
                ": name another directory or remove it.");
  }
  return PrepareSummary{split_from_json(made.at("train")), split_from_json(made.at("val")),
                        made.at("vocab_size").integer(), true};
}

constexpr std::size_t group_bytes = 4 << 20;  // in memory at a time: many tasks for the threads, frequent progress
constexpr std::size_t task_bytes = 64 << 10;  // long documents are encoded in several tasks

// Runs work(0) .. work(n - 1), each once, on some threads, and throws what one of them threw.
template <class Work>
void parallel_for(std::size_t n, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::vector<std::future<void>> workers(static_cast<std::size_t>(threads));
  for (std::future<void>& worker : workers) {
    worker = std::async(std::launch::async, [&] {
      for (std::size_t i; (i = next.fetch_add(1)) < n;) work(i);
    });
  }
  for (std::future<void>& worker : workers) worker.get();
}

// Reports on a pass over the documents that begins now: report(tokens so far, bytes that were read but wait).
auto begin_pass(const char* phase, const PrepareOptions& options, const Documents& documents) {
  return [&, phase, begin = std::chrono::steady_clock::now()](std::int64_t tokens, std::size_t waiting) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (options.progress)
      options.progress({phase, documents.bytes_read() - static_cast<std::int64_t>(waiting), documents.bytes(), tokens,
                        seconds.count()});
  };
}

// The shards of one split: PREFIX000000.bin, PREFIX000001.bin, ... Each ends with the document that fills it.
struct Split {
  std::string prefix;
  Vocabulary vocabulary;
  std::int64_t shard_tokens;
  SplitSummary& summary;
  std::string* sources;  // of its documents, if wanted: a line each
  std::optional<ShardWriter> shard = {};

  void add(const std::vector<std::int32_t>& ids, std::size_t bytes, bool no_target) {
    if (!shard) shard.emplace(str(prefix, std::setfill('0'), std::setw(6), summary.shards++, ".bin"), vocabulary);
    shard->add(ids, no_target);
    summary.bytes += static_cast<std::int64_t>(bytes);
    summary.tokens += std::ssize(ids);
  }
  void end_document(const std::string& source) {
    shard->end_document();
    ++summary.documents;
    if (sources) *sources += source + "\n";
    if (shard->tokens() >= shard_tokens) finish();
  }
  void finish() {
    if (shard) shard->finish();
    shard.reset();
  }
};

// The first document is not held out, so that there is something to train on.
bool is_validation(const PrepareOptions& options, const Document& document) {
  return document.number > 0 &&
         happens(options.validation_share, document_draw(options.seed, document.number, DocumentDraw::split)[0]);
}

// A stretch of a document: a special id, or text that becomes ids.
struct Part {
  const Document& document;
  std::string_view text;
  bool no_target;
  std::vector<std::int32_t> ids;
  bool last = false;  // of the document
};

// Appends the parts of a document, ids of text still to come. Counts what fill-in-the-middle did in `train`.
void cut(std::vector<Part>& parts, const Document& document, const PrepareOptions& options, const Tokenizer& tokenizer,
         SplitSummary& train) {
  const auto add = [&](std::string_view text, bool no_target = false) {
    while (!text.empty()) {
      const std::size_t end = tokenizer.next_cut(text, task_bytes);
      parts.push_back({document, text.substr(0, end), no_target, {}});
      text.remove_prefix(end);
    }
  };
  const std::string_view text = document.text;
  parts.push_back({document, {}, false, {tokenizer.eot()}});
  if (document.prompt_bytes > 0 || is_validation(options, document)) {
    add(text.substr(0, document.prompt_bytes), true);
    add(text.substr(document.prompt_bytes));
  } else {
    std::string_view rest = text;
    for (std::int64_t piece = 0; !rest.empty(); ++piece) {
      const std::size_t end = fim_piece(rest, options.fim_bytes);
      const FimParts fim = fim_split(rest.substr(0, end), options.fim, options.seed, document.number, piece);
      rest.remove_prefix(end);
      train.psm += fim.mode == FimMode::psm;
      train.spm += fim.mode == FimMode::spm;
      for (const FimSegment& segment : fim_segments(fim, tokenizer)) {
        if (segment.id >= 0) parts.push_back({document, {}, false, {segment.id}});
        add(segment.text);
      }
      // What is filled in has an end, also where the document goes on.
      if (fim.mode != FimMode::none && !rest.empty()) parts.push_back({document, {}, false, {tokenizer.eot()}});
    }
  }
  parts.back().last = true;
}

// The bytes of a tokenizer trained on whole training documents: on those that come first in an order drawn by the seed
// until there are tokenizer_bytes. `summary` says how many.
std::string train_tokenizer(const PrepareOptions& options, Documents& documents, PrepareSummary& summary) {
  using Drawn = std::pair<std::uint64_t, std::string>;
  const auto before = [](const Drawn& a, const Drawn& b) { return a.first < b.first; };
  std::vector<Drawn> sample;  // a heap, the last in the order at its front
  const auto report = begin_pass("reading words", options, documents);
  documents.each([&](Document&& document) {
    report(0, 0);
    if (is_validation(options, document)) return;
    const Philox draw = document_draw(options.seed, document.number, DocumentDraw::split);
    summary.tokenizer_bytes += std::ssize(document.text);
    sample.emplace_back(std::uint64_t{draw[1]} << 32 | draw[2], std::move(document.text));
    std::push_heap(sample.begin(), sample.end(), before);
    while (summary.tokenizer_bytes - std::ssize(sample.front().second) >= options.tokenizer_bytes) {
      std::pop_heap(sample.begin(), sample.end(), before);
      summary.tokenizer_bytes -= std::ssize(sample.back().second);
      sample.pop_back();
    }
  });
  summary.tokenizer_documents = std::ssize(sample);
  WordCounts words;
  for (const auto& [draw, text] : sample) words.add(text);
  if (options.progress) options.progress({"training the tokenizer", 0, documents.bytes()});
  return Tokenizer::train(words, options.vocab_size);
}

// All documents as ids, each to the split that its number draws. Encoding runs in parallel; what is written is in the
// order of the documents and does not depend on the number of threads. A few megabytes of text, or one document, and
// the ids of a few megabytes are held at a time.
void encode_documents(const PrepareOptions& options, Documents& documents, const Tokenizer& tokenizer,
                      const std::string& dir, PrepareSummary& summary) {
  const int threads = options.threads > 0 ? options.threads : available_threads();
  const Vocabulary vocabulary{tokenizer.vocab_size(), tokenizer.eot(), tokenizer.hash()};
  summary.vocab_size = vocabulary.size;
  std::string held_out;
  Split train{dir + "/train_", vocabulary, options.shard_tokens, summary.train, nullptr};
  Split val{dir + "/val_", vocabulary, options.shard_tokens, summary.val, &held_out};
  const auto report = begin_pass("encoding", options, documents);
  std::deque<Document> group;
  std::vector<Part> parts;
  std::size_t bytes = 0;  // of their text
  const auto encode_group = [&] {
    for (auto part = parts.begin(), begin = part; part != parts.end();) {
      for (std::size_t n = 0; part != parts.end() && n < group_bytes; ++part) n += part->text.size();
      parallel_for(static_cast<std::size_t>(part - begin), threads, [&](std::size_t i) {
        auto& [document, text, no_target, ids, last] = begin[static_cast<std::ptrdiff_t>(i)];
        if (text.empty()) return;
        ids = tokenizer.encode(text);
        check(tokenizer.lossless() || tokenizer.decode(ids) == text, document.source,
              ": the tokenizer changes this text (such models lose U+2581 and bytes that are not UTF-8): leave the "
              "document out, or let prepare train a tokenizer.");
      });
      for (; begin != part; ++begin) {
        Split& split = is_validation(options, begin->document) ? val : train;
        split.add(begin->ids, begin->text.size(), begin->no_target);
        if (begin->last) split.end_document(begin->document.source);
        bytes -= begin->text.size();
        begin->ids = {};
      }
      if (bytes > 0) report(summary.train.tokens + summary.val.tokens, bytes);
    }
    report(summary.train.tokens + summary.val.tokens, 0);
    group.clear();
    parts.clear();
  };
  documents.each([&](Document&& document) {
    bytes += document.text.size();
    cut(parts, group.emplace_back(std::move(document)), options, tokenizer, summary.train);
    if (bytes >= group_bytes) encode_group();
  });
  encode_group();
  train.finish();
  val.finish();
  write_text(dir + "/val_documents.txt", held_out);
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
  check_usage(options.tokenizer_bytes > 0, "tokenizer_bytes is ", options.tokenizer_bytes, " but must be positive.");
  check_usage(options.shard_tokens > 0, "shard_tokens is ", options.shard_tokens, " but must be positive.");
  Documents documents(options.inputs, options.patterns);
  std::optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty()) tokenizer = Tokenizer::load(options.tokenizer);
  const Json settings = settings_of(options, documents, tokenizer);
  const std::string out = plain_path(options.out);
  if (const auto before = made_before(out, settings)) return *before;

  NewDirectory dir(out);
  PrepareSummary summary;
  if (!tokenizer) tokenizer = Tokenizer::parse(train_tokenizer(options, documents, summary), "the trained tokenizer");
  encode_documents(options, documents, *tokenizer, dir.path(), summary);
  Json json = Json::object();
  json.set("settings", settings);
  json.set("inputs", list_of(options.inputs));
  json.set("patterns", list_of(options.patterns));
  json.set("vocab_size", summary.vocab_size);
  json.set("byte_exact", tokenizer->lossless());
  json.set("tokenizer_documents", summary.tokenizer_documents);
  json.set("train", to_json(summary.train));
  json.set("val", to_json(summary.val));
  write_text(dir.path() + "/tokenizer.model", tokenizer->model());
  write_text(dir.path() + "/prepare.json", json.dump(2) + "\n");
  dir.publish();
  summary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return summary;
}

}  // namespace onescale

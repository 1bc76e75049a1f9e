#include "data/encoder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <iomanip>
#include <optional>
#include <thread>
#include <utility>

#include "data/shard.h"
#include "kernels/error.h"

namespace onescale {
namespace {

constexpr std::size_t group_bytes = 4 << 20;  // in memory at a time: many tasks for the threads, frequent progress
constexpr std::size_t task_bytes = 64 << 10;  // long documents are encoded in several tasks

// Runs work(0) .. work(n - 1), each once, on some threads, and throws what one of them threw.
template <class Work>
void parallel_for(std::size_t n, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::vector<std::future<void>> workers;
  for (int t = 0; t < threads; ++t) {
    workers.push_back(std::async(std::launch::async, [&] {
      for (std::size_t i; (i = next.fetch_add(1)) < n;) work(i);
    }));
  }
  for (std::future<void>& worker : workers) worker.get();
}

// One pass over the documents, which it takes back to their beginning.
class Pass {
 public:
  Pass(const char* phase, const PrepareOptions& options, Documents& documents)
      : phase_(phase), options_(options), documents_(documents), begin_(std::chrono::steady_clock::now()) {
    documents.rewind();
  }
  void report(std::int64_t tokens) const {
    if (!options_.progress) return;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin_;
    options_.progress({phase_, documents_.bytes_read(), documents_.bytes(), tokens, seconds.count()});
  }

 private:
  const char* phase_;
  const PrepareOptions& options_;
  const Documents& documents_;
  std::chrono::steady_clock::time_point begin_;
};

// The shards of one split: PREFIX000000.bin, PREFIX000001.bin, ... Each ends with the document that fills it.
struct Split {
  std::string prefix;
  Vocabulary vocabulary;
  std::int64_t shard_tokens;
  SplitSummary& summary;
  std::optional<ShardWriter> shard = {};

  void add(const std::vector<std::int32_t>& ids, const std::vector<std::uint8_t>& no_target, std::size_t bytes) {
    if (!shard) shard.emplace(str(prefix, std::setfill('0'), std::setw(6), summary.shards++, ".bin"), vocabulary);
    shard->add_document(ids, no_target);
    ++summary.documents;
    summary.bytes += static_cast<std::int64_t>(bytes);
    summary.tokens += std::ssize(ids);
    if (shard->tokens() >= shard_tokens) finish();
  }
  void finish() {
    if (shard) shard->finish();
    shard.reset();
  }
};

bool below(std::uint32_t word, double share) {
  return static_cast<double>(word) < share * 4294967296.0;
}

bool is_validation(const PrepareOptions& options, std::int64_t number) {
  return below(document_draw(options.seed, number, DocumentDraw::split)[0], options.validation_share);
}

// A stretch of a document: a special id, or text that becomes ids.
struct Part {
  std::size_t document;  // in its group
  std::string_view text;
  bool no_target;
  std::vector<std::int32_t> ids;
};

// Appends the parts of a document, ids of text still to come. Counts what fill-in-the-middle did in `train`.
void cut(std::vector<Part>& parts, std::size_t index, const Document& document, std::int64_t number,
         const PrepareOptions& options, const Tokenizer& tokenizer, SplitSummary& train) {
  const auto add = [&](std::string_view text, bool no_target) {
    while (!text.empty()) {
      const std::size_t end = tokenizer.next_cut(text, task_bytes);
      parts.push_back({index, text.substr(0, end), no_target, {}});
      text.remove_prefix(end);
    }
  };
  const std::string_view text = document.text;
  parts.push_back({index, {}, false, {tokenizer.eot()}});
  if (document.prompt_bytes > 0 || is_validation(options, number)) {
    add(text.substr(0, document.prompt_bytes), true);
    add(text.substr(document.prompt_bytes), false);
    return;
  }
  const FimParts fim = fim_split(text, options.fim, options.seed, number);
  train.psm += fim.mode == FimMode::psm;
  train.spm += fim.mode == FimMode::spm;
  for (const FimSegment& segment : fim_segments(fim, tokenizer)) {
    if (segment.id >= 0) parts.push_back({index, {}, false, {segment.id}});
    add(segment.text, false);
  }
}

}  // namespace

std::string train_tokenizer(const PrepareOptions& options, Documents& documents) {
  WordCounts words;
  const double share = static_cast<double>(options.tokenizer_bytes) / static_cast<double>(documents.bytes());
  const Pass reading("reading words", options, documents);
  Document document;
  for (std::int64_t number = 0; documents.next(document); ++number) {
    if (is_validation(options, number) || !below(document_draw(options.seed, number, DocumentDraw::split)[1], share))
      continue;
    words.add(document.text);
    reading.report(0);
  }
  check(words.bytes() > 0, "All documents fell to validation: lower val_share, change seed or add documents.");
  Pass("training the tokenizer", options, documents).report(0);
  return Tokenizer::train(words, options.vocab_size);
}

PrepareSummary encode_documents(const PrepareOptions& options, Documents& documents, const Tokenizer& tokenizer,
                                const std::string& dir) {
  const int threads =
      options.threads > 0 ? options.threads : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const Vocabulary vocabulary{tokenizer.vocab_size(), tokenizer.eot(), tokenizer.hash()};
  PrepareSummary summary;
  summary.vocab_size = vocabulary.size;
  Split train{dir + "/train_", vocabulary, options.shard_tokens, summary.train};
  Split val{dir + "/val_", vocabulary, options.shard_tokens, summary.val};
  const Pass encoding("encoding", options, documents);
  std::vector<Document> group;
  std::vector<Part> parts;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> no_target;
  for (std::int64_t first = 0;; first += std::ssize(group)) {
    group.clear();
    parts.clear();
    std::size_t bytes = 0;
    for (Document document; bytes < group_bytes && documents.next(document);) {
      bytes += document.text.size();
      group.push_back(std::move(document));
    }
    if (group.empty()) break;
    for (std::size_t d = 0; d < group.size(); ++d)
      cut(parts, d, group[d], first + static_cast<std::int64_t>(d), options, tokenizer, summary.train);
    parallel_for(parts.size(), threads, [&](std::size_t i) {
      Part& part = parts[i];
      if (part.text.empty()) return;
      part.ids = tokenizer.encode(part.text);
      check(tokenizer.lossless() || tokenizer.decode(part.ids) == part.text, group[part.document].source,
            ": the tokenizer changes this text (such models lose U+2581 and bytes that are not UTF-8): leave the "
            "document out, or let prepare train a tokenizer.");
    });
    for (auto part = parts.begin(); part != parts.end();) {
      const std::size_t d = part->document;
      ids.clear();
      no_target.clear();
      for (; part != parts.end() && part->document == d; ++part) {
        ids.insert(ids.end(), part->ids.begin(), part->ids.end());
        if (group[d].prompt_bytes > 0) no_target.resize(ids.size(), part->no_target ? 1 : 0);
      }
      Split& split = is_validation(options, first + static_cast<std::int64_t>(d)) ? val : train;
      split.add(ids, no_target, group[d].text.size());
    }
    encoding.report(summary.train.tokens + summary.val.tokens);
  }
  train.finish();
  val.finish();
  check(summary.train.documents > 0, "All ", summary.val.documents,
        " documents fell to validation: lower val_share, change seed or add documents.");
  return summary;
}

}  // namespace onescale

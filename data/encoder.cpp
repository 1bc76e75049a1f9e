#include "data/encoder.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "kernels/error.h"

namespace onescale {
namespace {

constexpr std::size_t group_bytes = 4 << 20;  // in memory at a time: many tasks for the threads, frequent progress
constexpr std::size_t task_bytes = 64 << 10;  // long documents are encoded in several tasks

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

}  // namespace

void SplitWriter::add(const std::vector<std::int32_t>& ids, const std::vector<std::uint8_t>& no_target,
                      std::size_t bytes) {
  if (!shard_) {
    std::string number = str(summary.shards++);
    number.insert(0, 6 - std::min<std::size_t>(6, number.size()), '0');
    shard_ = std::make_unique<ShardWriter>(prefix_ + number + ".bin", vocabulary_);
  }
  shard_->add_document(ids, no_target);
  ++summary.documents;
  summary.bytes += static_cast<std::int64_t>(bytes);
  summary.tokens += std::ssize(ids);
  if (shard_->tokens() >= shard_tokens_) finish();
}

void SplitWriter::finish() {
  if (shard_) shard_->finish();
  shard_.reset();
}

void DocumentEncoder::begin(const char* phase) {
  progress_ = {phase, 0, documents_.bytes(), 0, 0};
  begin_ = std::chrono::steady_clock::now();
  documents_.rewind();
}

void DocumentEncoder::report(std::int64_t tokens) {
  if (!options_.progress) return;
  progress_.bytes = documents_.bytes_read();
  progress_.tokens = tokens;
  progress_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  options_.progress(progress_);
}

bool DocumentEncoder::is_validation(std::int64_t number) const {
  const Philox draw = document_draw(options_.seed, number, DocumentDraw::split);
  return static_cast<double>(draw[0]) < options_.validation_share * 4294967296.0;
}

std::string DocumentEncoder::train_tokenizer() {
  WordCounts words;
  const double share = static_cast<double>(options_.tokenizer_bytes) / static_cast<double>(documents_.bytes());
  begin("reading words");
  Document document;
  for (std::int64_t number = 0; documents_.next(document); ++number) {
    const Philox draw = document_draw(options_.seed, number, DocumentDraw::split);
    if (is_validation(number) || static_cast<double>(draw[1]) >= share * 4294967296.0) continue;
    words.add(document.text);
    report(0);
  }
  check(words.bytes() > 0, "All documents fell to validation: lower val_share, change seed or add documents.");
  begin("training the tokenizer");
  report(0);
  return Tokenizer::train(words, options_.vocab_size);
}

void DocumentEncoder::cut(std::vector<Part>& parts, std::size_t index, const Document& document, std::int64_t number,
                          const Tokenizer& tokenizer, SplitSummary& train) const {
  const auto add = [&](std::string_view text, bool no_target) {
    while (!text.empty()) {
      const std::size_t end = tokenizer.next_cut(text, task_bytes);
      parts.push_back({index, text.substr(0, end), no_target, {}});
      text.remove_prefix(end);
    }
  };
  const std::string_view text = document.text;
  parts.push_back({index, {}, false, {tokenizer.eot()}});
  if (document.prompt_bytes > 0 || is_validation(number)) {
    add(text.substr(0, document.prompt_bytes), true);
    add(text.substr(document.prompt_bytes), false);
    return;
  }
  const FimParts fim = fim_split(text, options_.fim, options_.seed, number);
  train.psm += fim.mode == FimMode::psm;
  train.spm += fim.mode == FimMode::spm;
  for (const FimSegment& segment : fim_segments(fim, tokenizer)) {
    if (segment.id >= 0) parts.push_back({index, {}, false, {segment.id}});
    add(segment.text, false);
  }
}

void DocumentEncoder::encode(const Tokenizer& tokenizer, SplitWriter& train, SplitWriter& val) {
  const int threads =
      options_.threads > 0 ? options_.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  begin("encoding");
  std::vector<Document> group;
  std::vector<Part> parts;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> no_target;
  for (std::int64_t first = 0;; first += std::ssize(group)) {
    group.clear();
    parts.clear();
    std::size_t bytes = 0;
    for (Document document; bytes < group_bytes && documents_.next(document);) {
      bytes += document.text.size();
      group.push_back(std::move(document));
    }
    if (group.empty()) break;
    for (std::size_t d = 0; d < group.size(); ++d) {
      cut(parts, d, group[d], first + static_cast<std::int64_t>(d), tokenizer, train.summary);
    }
    parallel_for(parts.size(), threads, [&](std::size_t i) {
      Part& part = parts[i];
      if (part.text.empty()) return;
      part.ids = tokenizer.encode(part.text);
      check(tokenizer.lossless() || tokenizer.decode(part.ids) == part.text, group[part.document].source,
            ": the tokenizer changes this text (such models lose U+2581 and bytes that are not UTF-8): leave the "
            "document out, "
            "or let prepare train a tokenizer.");
    });
    for (auto part = parts.begin(); part != parts.end();) {
      const std::size_t d = part->document;
      ids.clear();
      no_target.clear();
      for (; part != parts.end() && part->document == d; ++part) {
        ids.insert(ids.end(), part->ids.begin(), part->ids.end());
        if (group[d].prompt_bytes > 0) no_target.resize(ids.size(), part->no_target ? 1 : 0);
      }
      SplitWriter& split = is_validation(first + static_cast<std::int64_t>(d)) ? val : train;
      split.add(ids, no_target, group[d].text.size());
    }
    report(train.summary.tokens + val.summary.tokens);
  }
  train.finish();
  val.finish();
}

}  // namespace onescale

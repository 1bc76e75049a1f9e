// The two passes over the documents that make a data set: words for a vocabulary, then ids into shards. Encoding runs
// in parallel; what is written is in the order of the documents and does not depend on the number of threads.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "data/documents.h"
#include "data/prepare.h"
#include "data/shard.h"

namespace onescale {

// The shards of one split: PREFIX000000.bin, PREFIX000001.bin, ...
class SplitWriter {
 public:
  SplitWriter(std::string prefix, const Vocabulary& vocabulary, std::int64_t shard_tokens)
      : prefix_(std::move(prefix)), vocabulary_(vocabulary), shard_tokens_(shard_tokens) {}

  // Appends a document of `bytes` bytes of text; see ShardWriter.
  void add(const std::vector<std::int32_t>& ids, const std::vector<std::uint8_t>& no_target, std::size_t bytes);
  void finish();

  SplitSummary summary;

 private:
  std::string prefix_;
  Vocabulary vocabulary_;
  std::int64_t shard_tokens_;
  std::unique_ptr<ShardWriter> shard_;
};

class DocumentEncoder {
 public:
  // Both must outlive it.
  DocumentEncoder(const PrepareOptions& options, Documents& documents) : options_(options), documents_(documents) {}

  // The bytes of a model trained on training documents.
  std::string train_tokenizer();
  // All documents as ids, each to the split that its number draws. Text is held a few megabytes at a time.
  void encode(const Tokenizer& tokenizer, SplitWriter& train, SplitWriter& val);

 private:
  // A stretch of a document: a special id, or text that becomes ids.
  struct Part {
    std::size_t document;
    std::string_view text;
    bool no_target;
    std::vector<std::int32_t> ids;
  };

  void begin(const char* phase);
  void report(std::int64_t tokens);
  bool is_validation(std::int64_t number) const;
  // The parts of document `number`, ids of text still to come. Counts what fill-in-the-middle did in `train`.
  void cut(std::vector<Part>& parts, std::size_t index, const Document& document, std::int64_t number,
           const Tokenizer& tokenizer, SplitSummary& train) const;

  const PrepareOptions& options_;
  Documents& documents_;
  PrepareProgress progress_{};
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace onescale

// `onescale prepare`: documents in, tokenizer and token shards out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/fim.h"

namespace onescale {

struct PrepareProgress {
  const char* phase;  // "reading words", "training the tokenizer", "encoding"
  std::int64_t bytes = 0, total_bytes = 0, tokens = 0;
  double seconds = 0;  // since this phase began
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
  double seconds_left() const {
    return bytes > 0 ? seconds * static_cast<double>(total_bytes - bytes) / static_cast<double>(bytes) : 0;
  }
};

struct PrepareOptions {
  std::vector<std::string> inputs, patterns;  // see Documents
  std::string out;                            // the directory to be made
  std::string tokenizer;                      // a sentencepiece model; empty: train one
  std::int64_t vocab_size = 4096;             // of the one that is trained
  std::int64_t tokenizer_bytes = 64'000'000;  // of text that one is trained on, in whole documents; held in memory
  double validation_share = 0.05;             // of all documents but the first, which is never held out
  FimRates fim;                               // acts on training documents only: loss on held-out text stays comparable
  std::int64_t fim_bytes = 0;                 // of the pieces that it rearranges, see fim_piece()
  std::uint64_t seed = 0;
  int threads = 0;                          // 0: all processors; the result does not depend on it
  std::int64_t shard_tokens = 100'000'000;  // a shard ends with the document that reaches this
  std::function<void(const PrepareProgress&)> progress;
};

struct SplitSummary {
  std::int64_t documents = 0;
  std::int64_t bytes = 0;         // of text
  std::int64_t tokens = 0;        // with special ones
  std::int64_t psm = 0, spm = 0;  // documents, or pieces of them, transformed
  std::int64_t shards = 0;
};

struct PrepareSummary {
  SplitSummary train, val;
  std::int64_t vocab_size = 0;
  bool reused = false;  // the directory was there already, made from the same inputs with the same settings
  std::int64_t tokenizer_documents = 0, tokenizer_bytes = 0;  // that it was trained on here; 0: it was not
  double seconds = 0;
};

// Writes OUT/tokenizer.model, OUT/train_000000.bin ..., OUT/val_000000.bin ... with their sidecars (data/shard.h),
// OUT/val_documents.txt: the sources of what is held out, a line each, and OUT/prepare.json: the settings and the
// summary. Each document is <|endoftext|> and its ids; where it goes on after a piece that was rearranged, another
// <|endoftext|> stands. All of it is written beside OUT and renamed at the end, so OUT is whole or absent. An OUT that
// exists is reused if prepare.json shows the same inputs and settings, else refused (UsageError).
PrepareSummary prepare(const PrepareOptions& options);

}  // namespace onescale

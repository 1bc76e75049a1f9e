// Token shards: llm.c's .bin, extended. A header of 256 int32 (little-endian), then the tokens.
// - [0] magic, [1] version: 20240520 and 1 for uint16 tokens, 20240801 and 7 for uint32 (vocabularies over 65536)
// - [2] number of tokens, -1 when it exceeds 2^31 - 1 (then only our extension holds it)
// The extension, all zero in llm.c's own files:
// - [3] vocabulary size, [4] end of text id
// - [5] flags: 1 extension present, 2 end of text begins each document, 4 has a mask
// - [6..13] tokenizer hash
// - [14], [15] number of tokens as int64, low word first
// - [16] largest id
// The file's size is exactly 1024 + tokens * bytes a token. Beside x.bin lie x.docs, the end of each document as a
// token offset (u64 LE, no header), and, if any target is to be ignored, x.mask: one bit a token, lowest bit first, 1
// where the token is no target.
// Read, but not written: Megatron's x.bin, raw tokens, with its x.idx beside it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/file.h"

namespace onescale {

// What identifies a vocabulary. The hash is Tokenizer::hash().
struct Vocabulary {
  std::int64_t size = 0;
  std::int32_t eot = -1;
  std::array<std::uint32_t, 8> hash{};
};

// Writes one shard and its sidecars. Throws Error naming the file when the disk is full or not writable.
class ShardWriter {
 public:
  // path ends in ".bin".
  ShardWriter(const std::string& path, const Vocabulary& vocabulary);

  // Appends a document, which begins with the end of text id, in stretches; of those with `no_target` no token is a
  // target.
  void add(std::span<const std::int32_t> ids, bool no_target = false);
  void end_document() { ends_.push_back(tokens_); }
  std::int64_t tokens() const { return tokens_; }
  // Writes header and sidecars and flushes them to the disk; a shard that is not finished is not readable.
  void finish();

 private:
  File file_;
  Vocabulary vocabulary_;
  std::vector<std::int64_t> ends_;
  std::vector<std::uint8_t> mask_;  // as in the file; empty while every token is a target
  std::int64_t tokens_ = 0;
  std::int32_t largest_ = 0;
};

// A shard that is read.
class Shard {
 public:
  // Checks everything that can be checked without knowing the tokens' meaning: magic, version, size, tokenizer hash,
  // vocabulary size and the largest id (from the header, or by one pass over files that are not ours). Each failure is
  // one sentence with the file, and the byte offset of an id that is too large. expected.size 0: not known, only the
  // file's own claims are checked; hash 0: not compared. The file stays open: one that is cut off later is found by
  // read().
  Shard(const std::string& path, const Vocabulary& expected);

  std::int64_t tokens() const { return tokens_; }
  // As the header claims them; size 0 and eot -1 for a file that is not ours.
  const Vocabulary& vocabulary() const { return vocabulary_; }
  // XXH3 of header, tokens and mask; of a large file evenly spaced stretches stand for the tokens, so it costs no pass.
  std::uint64_t hash(std::uint64_t seed) const;

  // ids[i] = token first + i; no_target[i] = 1 where it is ignored in the loss, else 0. Throws Error with file and
  // offset if an id is not below the size of the shard's own vocabulary, or of the expected one where that is unknown.
  void read(std::int64_t first, std::int64_t count, std::int32_t* ids, std::uint8_t* no_target) const;

 private:
  void open_llmc(const Vocabulary& expected);
  void open_megatron(const std::string& index);

  File file_;
  std::optional<File> mask_;  // none: every token is a target
  Vocabulary vocabulary_;
  std::int64_t begin_ = 0, tokens_ = 0, width_ = 2;  // token i lies at byte begin_ + i * width_
  std::int64_t limit_ = 0;                           // every id is below this
  std::int64_t claimed_largest_ = -1;                // id, by the header; -1: not known
};

}  // namespace onescale

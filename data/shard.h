// Token shards: llm.c's .bin, extended. A header of 256 int32 (little-endian), then the tokens.
//   [0] magic 20240520 and [1] version 1: uint16 tokens; or magic 20240801 and version 7: uint32 tokens (vocabularies
//   over 65536) [2] number of tokens, -1 when it exceeds 2^31 - 1 (then only our extension holds it) The extension, all
//   zero in llm.c's own files: [3] vocabulary size   [4] end of text id   [5] flags: 1 extension present, 2 end of text
//   begins each document, 4 has a mask [6..13] tokenizer hash   [14] [15] number of tokens as int64, low word first
//   [16] largest id
// The file's size is exactly 1024 + tokens * bytes a token. Beside x.bin lie x.docs, the end of each document as a
// token offset (u64 LE, no header), and, if any target is to be ignored, x.mask: one bit a token, lowest bit first, 1
// where the token is no target.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

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
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Appends one document that begins with the end of text id. no_target [ids.size()] or empty: tokens to be ignored in
  // the loss.
  void add_document(std::span<const std::int32_t> ids, std::span<const std::uint8_t> no_target = {});
  std::int64_t tokens() const { return tokens_; }
  // Writes header and sidecars and flushes them to the disk; a shard that is not finished is not readable.
  void finish();

 private:
  struct Files;
  std::string path_;
  Vocabulary vocabulary_;
  std::unique_ptr<Files> files_;
  std::vector<std::uint8_t> mask_;  // as in the file; empty while every token is a target
  std::int64_t tokens_ = 0;
  std::int32_t largest_ = 0;
};

// A shard mapped into memory, read only.
class Shard {
 public:
  // Checks everything that can be checked without knowing the tokens' meaning: magic, version, size, tokenizer hash,
  // vocabulary size and the largest id (from the header, or by one pass over files that are not ours). Each failure is
  // one sentence with the file, and the byte offset of an id that is too large. expected.size 0: not known, only the
  // file's own claims are checked; hash 0: not compared. threads 0: all.
  Shard(const std::string& path, const Vocabulary& expected, int threads = 1);

  const std::string& path() const { return path_; }
  std::int64_t tokens() const { return tokens_; }
  // As the header claims them; size 0 and eot -1 for a plain llm.c file.
  const Vocabulary& vocabulary() const { return vocabulary_; }
  bool has_mask() const { return mask_ != nullptr; }

  // ids[i] = token first + i. Throws Error with file and offset if one is not below the vocabulary size.
  void read(std::int64_t first, std::int64_t count, std::int32_t* ids) const;
  // no_target[i] = 1 where token first + i is ignored in the loss.
  void read_mask(std::int64_t first, std::int64_t count, std::uint8_t* no_target) const;
  // Token offsets of document ends; empty when the sidecar is absent.
  std::vector<std::int64_t> document_ends() const;
  // File offset of a token.
  std::int64_t byte_of(std::int64_t token) const { return 1024 + token * width_; }

 private:
  struct Mapping;
  // The first token >= limit, or -1.
  std::int64_t first_not_below(std::int64_t limit, int threads) const;

  std::string path_;
  Vocabulary vocabulary_;
  std::shared_ptr<const Mapping> file_, mask_file_;
  const std::uint8_t* mask_ = nullptr;
  std::int64_t tokens_ = 0, width_ = 2;
  std::int64_t limit_ = 0;  // every id is below this
};

}  // namespace onescale

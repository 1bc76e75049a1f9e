// What the tests of data/ share: files, arbitrary texts and a small tokenizer.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "data/shard.h"
#include "data/tokenizer.h"
#include "parallel/file.h"
#include "tests/temp_dir.h"

namespace onescale {

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

// The sidecar of a shard.
inline std::vector<std::int64_t> document_ends(const std::string& docs) {
  const std::string bytes = read_text(docs);
  std::vector<std::int64_t> ends(bytes.size() / 8);
  std::memcpy(ends.data(), bytes.data(), ends.size() * 8);
  return ends;
}

inline void add_document(ShardWriter& writer, std::span<const std::int32_t> ids,
                         const std::vector<std::uint8_t>& no_target = {}) {
  const auto ignored = [&](std::size_t i) { return !no_target.empty() && no_target[i] != 0; };
  for (std::size_t i = 0, end = 0; i < ids.size(); i = end) {
    while (end < ids.size() && ignored(end) == ignored(i)) ++end;
    writer.add(ids.subspan(i, end - i), ignored(i));
  }
  writer.end_document();
}

inline void expect_contains(const std::string& sentence, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(sentence.find(part), std::string::npos) << "no '" << part << "' in: " << sentence;
}

// A text of up to max_parts parts, of which many are the ones that tokenizers tend to change.
inline std::string arbitrary_text(std::mt19937& random, int max_parts) {
  static const std::vector<std::string> parts = {std::string(1, '\0'),
                                                 "\r\n",
                                                 "\n",
                                                 "\n\n",
                                                 "\r",
                                                 "\t",
                                                 " ",
                                                 "    ",
                                                 "        ",
                                                 "\n    ",
                                                 "\xE2\x96\x81",
                                                 "\xE2\x96",
                                                 "\xFF",
                                                 "\xC0\x80",
                                                 "\xED\xA0\x80",
                                                 "\xF4\x90\x80\x80",
                                                 "\xF0\x9F\x98\x80",
                                                 "\xEF\xBB\xBF",
                                                 "\xC2\xA0",
                                                 "e\xCC\x81",
                                                 "\xEF\xBC\xA1",
                                                 "<|endoftext|>",
                                                 "<fim_prefix>",
                                                 "<fim_middle>",
                                                 "<fim_suffix>",
                                                 "<fim_pad>",
                                                 "<unk>",
                                                 "<s>",
                                                 "<0x41>",
                                                 "def f(x):",
                                                 "return",
                                                 "x",
                                                 "_name",
                                                 "(self, ",
                                                 "1234",
                                                 "0",
                                                 "==",
                                                 "\x7F",
                                                 "\xC4\xA0",
                                                 "\xC4\x8A"};
  std::string text;
  const int n = static_cast<int>(random() % static_cast<unsigned>(max_parts + 1));
  for (int i = 0; i < n; ++i) {
    if (random() % 3 == 0) {
      text += static_cast<char>(random() & 0xFF);
    } else {
      text += parts[random() % parts.size()];
    }
  }
  return text;
}

inline const char* sample_code() {
  return "import os\n\n\nclass Thing:\n    def __init__(self, name, value=10):\n        self.name = name\n        "
         "self.value = value\n\n"
         "    def total(self, items):\n        result = 0\n        for item in items:\n            result += "
         "item.value * 2\n"
         "        return result\n\n\ndef main():\n\tthing = Thing('caf\xC3\xA9', 37)\r\n\tif thing.total([thing]) > "
         "12:\r\n\t\tprint(thing.name)\r\n";
}

inline const Tokenizer& tiny_tokenizer() {
  static const Tokenizer tokenizer = [] {
    WordCounts words;
    for (int i = 0; i < 3; ++i) words.add(sample_code());
    return Tokenizer::parse(Tokenizer::train(words, 320), "tiny");
  }();
  return tokenizer;
}

inline Vocabulary vocabulary_of(const Tokenizer& tokenizer) {
  return {tokenizer.vocab_size(), tokenizer.eot(), tokenizer.hash()};
}

}  // namespace onescale

// A sentencepiece model used so that encoding loses nothing: any bytes come back exactly. Only tokenizer.cpp includes
// sentencepiece.
//
// Our own models are byte-level BPE: every byte is first written as one visible character (the table of GPT-2's
// byte-level BPE), so the model's alphabet is these 256 characters, and there is neither an unknown symbol nor a
// normalisation. A model is recognised as such by its alphabet: all 256 characters are pieces and sentencepiece's own
// space, U+2581, is not. Any other sentencepiece model is used as it is, if it gives back a few probing strings
// unchanged; it may still lose U+2581 and invalid UTF-8, see lossless().
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace onescale {

// The words of a text and how often each occurs: what a vocabulary is trained on. No piece crosses the end of a word,
// so the rules of words decide what pieces can look like. A word is one digit, or a run of letters and punctuation,
// alone or with the space or the line ends and the indentation before it; a longer run of spaces leaves its last one to
// the word after it.
struct WordCounts {
  void add(std::string_view text);

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, std::int64_t, Hash, std::equal_to<>> counts;
  std::int64_t bytes = 0;  // of all texts
};

class Tokenizer {
 public:
  // Throws Error, naming the file, for what is not a sentencepiece model, lacks an end of text symbol, changes text
  // (the sentence names the flags to train with) or whose special symbols could arise from text.
  static Tokenizer load(const std::string& path);
  static Tokenizer parse(std::string model, const std::string& where);

  // Trains a byte-level BPE with exactly vocab_size pieces and returns the bytes of the model file, which depend on the
  // arguments alone. ids: 0 unknown (never used), 1 <|endoftext|>, 2..5 <fim_prefix> <fim_middle> <fim_suffix>
  // <fim_pad>, then learned pieces and the alphabet. Throws UsageError when the words do not give that many pieces.
  static std::string train(const WordCounts& words, std::int64_t vocab_size);

  // The ids of a text; never a special one, whatever the text says. Safe to call from many threads.
  std::vector<std::int32_t> encode(std::string_view text) const;
  // The bytes of ids; special ids and ids outside the vocabulary give none. decode(a + b) = decode(a) + decode(b).
  std::string decode(std::span<const std::int32_t> ids) const;
  // What one id decodes to: may be a part of a character.
  std::string_view piece_bytes(std::int32_t id) const;
  std::int64_t byte_length(std::int32_t id) const { return static_cast<std::int64_t>(piece_bytes(id).size()); }

  // The first position >= from at which text may be cut so that encode(text) = encode(left) + encode(right); its size
  // if there is none.
  std::size_t next_cut(std::string_view text, std::size_t from) const;

  std::int64_t vocab_size() const { return static_cast<std::int64_t>(pieces_.size()); }
  std::int32_t eot() const { return eot_; }
  // -1 when the model lacks it.
  std::int32_t fim_prefix() const { return fim_prefix_; }
  std::int32_t fim_middle() const { return fim_middle_; }
  std::int32_t fim_suffix() const { return fim_suffix_; }
  bool has_fim() const { return fim_prefix_ >= 0 && fim_middle_ >= 0 && fim_suffix_ >= 0; }

  // decode(encode(x)) = x for all x by construction. Otherwise a caller that needs it has to compare.
  bool lossless() const { return byte_level_; }
  // XXH3-128 of the model file in the first four words, low word first, zeros after: the hash in the header of a shard.
  const std::array<std::uint32_t, 8>& hash() const { return hash_; }
  // The bytes of the model file, to be copied into a checkpoint as tokenizer.model.
  const std::string& model() const { return model_; }

 private:
  std::shared_ptr<const sentencepiece::SentencePieceProcessor> processor_;
  std::string model_;
  std::vector<std::string> pieces_;  // bytes of each id
  std::bitset<65536> inside_;        // pairs of bytes, first * 256 + second, that stand side by side in some piece
  std::array<std::uint32_t, 8> hash_{};
  std::int32_t eot_ = -1, fim_prefix_ = -1, fim_middle_ = -1, fim_suffix_ = -1;
  bool byte_level_ = false;
};

}  // namespace onescale

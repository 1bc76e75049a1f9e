#include "data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "kernels/error.h"
#include "parallel/file.h"

namespace onescale {
namespace {

constexpr std::int64_t alphabet_size = 256;
constexpr std::size_t max_word_bytes = 48, max_piece_characters = 32;
// Encoding takes longer than linear time in the length of a text, so it is fed stretches of about this many bytes.
constexpr std::size_t stretch_bytes = 2048;
constexpr const char* space_symbol = "\xE2\x96\x81";  // sentencepiece's U+2581
constexpr const char* special_symbols = "<|endoftext|>,<fim_prefix>,<fim_middle>,<fim_suffix>,<fim_pad>";
constexpr std::int64_t special_ids = 6;  // with the unknown symbol

// The character that stands for a byte: itself where Latin-1 shows it, else the next one from U+0100 on. All lie below
// U+0800.
struct Alphabet {
  std::array<std::string, 256> utf8;
  std::array<std::int16_t, 0x800> byte{};  // of a code point, -1 where it stands for none

  Alphabet() {
    byte.fill(-1);
    unsigned next = 256;
    for (unsigned b = 0; b < 256; ++b) {
      const bool visible = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
      const unsigned point = visible ? b : next++;
      byte[point] = static_cast<std::int16_t>(b);
      if (point >= 0x80) utf8[b] += static_cast<char>(0xC0 | point >> 6);
      utf8[b] += static_cast<char>(point < 0x80 ? point : 0x80 | (point & 0x3F));
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet table;
  return table;
}

std::string to_characters(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const char c : bytes) out += alphabet().utf8[static_cast<std::uint8_t>(c)];
  return out;
}

// The inverse; characters that stand for no byte are left out.
std::string to_bytes(std::string_view characters) {
  std::string out;
  for (std::size_t i = 0; i < characters.size(); ++i) {
    unsigned point = static_cast<std::uint8_t>(characters[i]);
    if (point >= 0xC0 && point < 0xE0 && i + 1 < characters.size()) {
      point = (point & 0x1F) << 6 | (static_cast<std::uint8_t>(characters[++i]) & 0x3F);
    }
    if (point < 0x800 && alphabet().byte[point] >= 0) out += static_cast<char>(alphabet().byte[point]);
  }
  return out;
}

enum class Class : std::uint8_t { line_end, space, digit, other, end };

Class class_at(std::string_view text, std::size_t i) {
  if (i >= text.size()) return Class::end;
  const char c = text[i];
  if (c == '\n' || c == '\r') return Class::line_end;
  if (c == ' ' || c == '\t') return Class::space;
  return c >= '0' && c <= '9' ? Class::digit : Class::other;
}

std::size_t word_end(std::string_view text, const std::size_t begin) {
  std::size_t i = begin;
  const auto skip = [&](Class kind) {
    while (class_at(text, i) == kind) ++i;
  };
  if (class_at(text, i) == Class::digit) return begin + 1;
  if (class_at(text, i) == Class::line_end) {
    skip(Class::line_end);
    skip(Class::space);
  } else if (class_at(text, i) == Class::space) {
    skip(Class::space);
    if (class_at(text, i) != Class::other) return i;
    if (i - begin > 1) return i - 1;
  }
  skip(Class::other);
  return i;
}

class Lines : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(std::vector<std::string> lines) : lines_(std::move(lines)) {}
  bool done() const override { return next_ == lines_.size(); }
  void Next() override { ++next_; }
  const std::string& value() const override { return lines_[next_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  std::vector<std::string> lines_;
  std::size_t next_ = 0;
};

}  // namespace

void WordCounts::add(std::string_view text) {
  bytes += std::ssize(text);
  for (std::size_t i = 0; i < text.size();) {
    // One byte beyond the longest word decides where it ends; a long run is not looked at whole for each of its words.
    const std::size_t end = i + std::min(word_end(text.substr(i, max_word_bytes + 1), 0), max_word_bytes);
    const std::string_view word = text.substr(i, end - i);
    const auto found = counts.find(word);  // no string is made for a word that is known
    ++(found != counts.end() ? found : counts.emplace(word, 0).first)->second;
    i = end;
  }
}

std::string Tokenizer::train(const WordCounts& words, std::int64_t vocab_size) {
  const std::int64_t smallest = alphabet_size + special_ids;
  check_usage(vocab_size >= smallest, "vocab_size is ", vocab_size, " but must be at least ", smallest,
              ": all bytes and the special symbols.");
  // Training takes time by the bytes of all different words, and rare ones give the last few pieces only: they are left
  // out once there is enough. Among equally frequent ones a hash chooses, which prefers no kind of them.
  const std::int64_t enough = std::max<std::int64_t>(1'000'000, 64 * vocab_size);
  std::vector<std::tuple<std::int64_t, std::uint64_t, std::string_view>> ranked;
  for (const auto& [word, count] : words.counts)
    ranked.emplace_back(count, XXH3_64bits(word.data(), word.size()), word);
  std::sort(ranked.begin(), ranked.end(), std::greater<>());
  std::vector<std::string> lines;
  std::int64_t bytes = 0, text_bytes = 0;  // of different words, of all that they stand for
  for (auto entry = ranked.begin(); entry != ranked.end() && bytes < enough; ++entry) {
    const auto& [count, hash, word] = *entry;
    bytes += std::ssize(word);
    text_bytes += count * std::ssize(word);
    lines.push_back(str(to_characters(word), '\t', count));
  }
  // sentencepiece leaves out the characters after those whose share, in float, is 1. So each also stands alone, where
  // it takes part in no pair, often enough for that share to differ from 1 without it.
  for (const std::string& character : alphabet().utf8) lines.push_back(str(character, '\t', 1 + (text_bytes >> 20)));
  std::sort(lines.begin(), lines.end());  // a hash table's order is not part of the result

  Lines iterator(std::move(lines));
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train({{"model_type", "bpe"},
                                                  {"input_format", "tsv"},
                                                  {"vocab_size", str(vocab_size)},
                                                  {"character_coverage", "1.0"},
                                                  {"normalization_rule_name", "identity"},
                                                  {"add_dummy_prefix", "false"},
                                                  {"remove_extra_whitespaces", "false"},
                                                  {"split_by_unicode_script", "false"},
                                                  {"split_by_number", "false"},
                                                  {"max_sentencepiece_length", str(max_piece_characters)},
                                                  {"control_symbols", special_symbols},
                                                  {"unk_id", "0"},
                                                  {"bos_id", "-1"},
                                                  {"eos_id", "-1"},
                                                  {"pad_id", "-1"},
                                                  {"num_threads", "1"},
                                                  {"minloglevel", "2"}},
                                                 &iterator, &model);
  const std::string message = status.ToString();
  const std::size_t bound = message.find("<= ");
  if (!status.ok() && bound != std::string::npos) {
    throw UsageError(str("vocab_size is ", vocab_size, " but these ", words.bytes, " bytes of text give at most ",
                         std::stoll(message.substr(bound + 3)), " pieces: lower vocab_size or add text."));
  }
  check(status.ok(), "Training the tokenizer failed: ", message);
  return model;
}

Tokenizer Tokenizer::load(const std::string& path) {
  return parse(read_text(path), path);
}

Tokenizer Tokenizer::parse(std::string model, const std::string& where) {
  auto processor = std::make_shared<sentencepiece::SentencePieceProcessor>();
  check(!model.empty() && processor->LoadFromSerializedProto(model).ok(), where,
        ": this is not a sentencepiece model; name a sentencepiece .model file.");

  Tokenizer t;
  const auto id_of = [&](const std::string& piece) {
    const int id = processor->PieceToId(piece);
    return id >= 0 && processor->IdToPiece(id) == piece ? id : -1;
  };
  t.byte_level_ = id_of(space_symbol) < 0 && std::all_of(alphabet().utf8.begin(), alphabet().utf8.end(),
                                                         [&](const std::string& c) { return id_of(c) >= 0; });
  for (int id = 0; id < processor->GetPieceSize(); ++id) {
    std::string piece = processor->IdToPiece(id), bytes;
    if (processor->IsByte(id)) {
      bytes = static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16));  // <0x41>
    } else if (t.byte_level_ && !processor->IsControl(id) && !processor->IsUnknown(id)) {
      bytes = to_bytes(piece);
    } else if (!processor->IsControl(id) && !processor->IsUnknown(id)) {
      bytes = piece;
      for (std::size_t i; (i = bytes.find(space_symbol)) != std::string::npos;) bytes.replace(i, 3, 1, ' ');
    }
    for (std::size_t i = 1; i < bytes.size(); ++i) {
      t.inside_.set(static_cast<std::uint8_t>(bytes[i - 1]) * 256U + static_cast<std::uint8_t>(bytes[i]));
    }
    t.pieces_.push_back(std::move(bytes));
  }

  const auto special = [&](const std::string& name) {
    const int id = id_of(name);
    check(id < 0 || processor->IsControl(id), where, ": ", name,
          " would be read from text; train the model with it among --control_symbols.");
    return id;
  };
  const auto fim = [&](const std::string& name) {
    const int id = special("<fim_" + name + ">");
    return id >= 0 ? id : special("<fim-" + name + ">");
  };
  t.eot_ = special("<|endoftext|>");
  if (t.eot_ < 0) t.eot_ = processor->eos_id();
  check(t.eot_ >= 0, where,
        ": the model has neither <|endoftext|> nor an end of sentence symbol; train it with "
        "--control_symbols='<|endoftext|>'.");
  t.fim_prefix_ = fim("prefix"), t.fim_middle_ = fim("middle"), t.fim_suffix_ = fim("suffix");

  const XXH128_hash_t hash = XXH3_128bits(model.data(), model.size());
  std::memcpy(t.hash_.data(), &hash, sizeof hash);
  t.processor_ = std::move(processor);
  t.model_ = std::move(model);
  for (const char* probe : {"a", " a  b ", "\tif x:\r\n\n    y", "\xC3\xA9\xEF\xBC\xA1\xE2\x82\xAC"}) {
    check(t.decode(t.encode(probe)) == probe, where,
          ": the model changes text; train it with --normalization_rule_name=identity --add_dummy_prefix=false "
          "--remove_extra_whitespaces=false --byte_fallback=true, or let prepare train one.");
  }
  return t;
}

std::size_t Tokenizer::next_cut(std::string_view text, std::size_t from) const {
  for (std::size_t i = std::max<std::size_t>(from, 1); i < text.size(); ++i) {
    const auto left = static_cast<std::uint8_t>(text[i - 1]), right = static_cast<std::uint8_t>(text[i]);
    const bool inside_character = !byte_level_ && (right & 0xC0) == 0x80;
    if (!inside_.test(left * 256U + right) && !inside_character) return i;
  }
  return text.size();
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  std::vector<int> part;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t end = next_cut(text, i + stretch_bytes);
    const std::string_view stretch = text.substr(i, end - i);
    const std::string input = byte_level_ ? to_characters(stretch) : std::string(stretch);
    const auto status = processor_->Encode(input, &part);
    check(status.ok(), "Encoding failed: ", status.ToString());
    ids.insert(ids.end(), part.begin(), part.end());
    i = end;
  }
  return ids;
}

std::string_view Tokenizer::piece_bytes(std::int32_t id) const {
  return id >= 0 && id < vocab_size() ? std::string_view(pieces_[static_cast<std::size_t>(id)]) : std::string_view();
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  for (const std::int32_t id : ids) text += piece_bytes(id);
  return text;
}

}  // namespace onescale

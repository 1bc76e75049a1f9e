#include "data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <set>

#include "tests/data/helpers.h"

namespace onescale {
namespace {

// sentencepiece's own way to train, for models that are not ours.
class Lines : public sentencepiece::SentenceIterator {
 public:
  bool done() const override { return next_ == 200; }
  void Next() override { ++next_; }
  const std::string& value() const override {
    return line_ = "def f" + std::to_string(next_ % 17) + "(self, value): return value";
  }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  int next_ = 0;
  mutable std::string line_;
};

std::string train_plain(const std::unordered_map<std::string, std::string>& changes) {
  std::unordered_map<std::string, std::string> flags = {{"model_type", "bpe"},
                                                        {"vocab_size", "300"},
                                                        {"hard_vocab_limit", "false"},
                                                        {"byte_fallback", "true"},
                                                        {"normalization_rule_name", "identity"},
                                                        {"remove_extra_whitespaces", "false"},
                                                        {"add_dummy_prefix", "false"},
                                                        {"allow_whitespace_only_pieces", "true"},
                                                        {"control_symbols", "<|endoftext|>"},
                                                        {"minloglevel", "2"}};
  for (const auto& [name, value] : changes) flags[name] = value;
  Lines lines;
  std::string model;
  EXPECT_TRUE(sentencepiece::SentencePieceTrainer::Train(flags, &lines, &model).ok());
  return model;
}

TEST(Tokenizer, LosesNothing) {
  const Tokenizer& t = tiny_tokenizer();
  ASSERT_TRUE(t.lossless());
  const std::set<std::int32_t> special = {0, t.eot(), t.fim_prefix(), t.fim_middle(), t.fim_suffix(), 5};
  ASSERT_EQ(special.size(), 6U);
  std::mt19937 random(1);
  for (int i = 0; i < 10000; ++i) {
    const std::string text = arbitrary_text(random, 30);
    const std::vector<std::int32_t> ids = t.encode(text);
    ASSERT_EQ(t.decode(ids), text) << "text " << i;
    std::int64_t bytes = 0;
    for (const std::int32_t id : ids) {
      ASSERT_FALSE(special.contains(id)) << "text " << i;
      bytes += t.byte_length(id);
    }
    ASSERT_EQ(bytes, std::ssize(text));
  }
}

TEST(Tokenizer, KnowsEveryByteAlone) {
  for (int b = 0; b < 256; ++b) {
    const std::string text(1, static_cast<char>(b));
    const std::vector<std::int32_t> ids = tiny_tokenizer().encode(text);
    ASSERT_EQ(ids.size(), 1U);
    EXPECT_EQ(tiny_tokenizer().piece_bytes(ids[0]), text);
  }
}

TEST(Tokenizer, SpecialIdsDecodeToNothing) {
  const Tokenizer& t = tiny_tokenizer();
  const std::vector<std::int32_t> ids = {-1, 0, t.eot(), t.fim_prefix(), t.fim_middle(), t.fim_suffix(), 5, 1 << 20};
  EXPECT_EQ(t.decode(ids), "");
  EXPECT_EQ(t.byte_length(t.eot()), 0);
}

// Long texts are encoded in stretches; the ids must be those of sentencepiece for the whole text, written in GPT-2's
// characters.
TEST(Tokenizer, StretchesGiveTheIdsOfTheWhole) {
  const Tokenizer& t = tiny_tokenizer();
  sentencepiece::SentencePieceProcessor whole;
  ASSERT_TRUE(whole.LoadFromSerializedProto(t.model()).ok());
  // bytes_to_unicode() of GPT-2: '!'..'~', U+00A1..U+00AC, U+00AE..U+00FF stand for themselves, the others for 256,
  // 257, ...
  std::vector<std::string> characters(256);
  int extra = 0;
  for (int b = 0; b < 256; ++b) {
    const bool itself = ('!' <= b && b <= '~') || (0xA1 <= b && b <= 0xAC) || 0xAE <= b;
    const int point = itself ? b : 256 + extra++;
    characters[static_cast<std::size_t>(b)] =
        point < 128 ? std::string(1, static_cast<char>(point))
                    : std::string{static_cast<char>(0xC0 | point >> 6), static_cast<char>(0x80 | point % 64)};
  }
  std::mt19937 random(2);
  for (int i = 0; i < 20; ++i) {
    std::string text;
    while (text.size() < 20000)
      text += random() % 4 == 0 ? arbitrary_text(random, 50) : std::string(sample_code()).substr(random() % 300);
    std::string mapped;
    for (const char c : text) mapped += characters[static_cast<std::uint8_t>(c)];
    std::vector<int> expected;
    ASSERT_TRUE(whole.Encode(mapped, &expected).ok());
    ASSERT_EQ(t.encode(text), expected);
    const std::size_t cut = t.next_cut(text, 7777);
    std::vector<std::int32_t> halves = t.encode(std::string_view(text).substr(0, cut));
    for (const std::int32_t id : t.encode(std::string_view(text).substr(cut))) halves.push_back(id);
    ASSERT_EQ(halves, expected);
  }
}

TEST(Tokenizer, TrainingDependsOnTheWordsAlone) {
  const std::string code = sample_code();
  WordCounts a, b;
  a.add(code), a.add("x = 1\n"), a.add("y == 2\n");
  b.add("y == 2\n"), b.add(code), b.add("x = 1\n");
  EXPECT_EQ(Tokenizer::train(a, 300), Tokenizer::train(b, 300));
  EXPECT_EQ(Tokenizer::parse(Tokenizer::train(a, 300), "a").hash(),
            Tokenizer::parse(Tokenizer::train(b, 300), "b").hash());
  EXPECT_NE(Tokenizer::parse(Tokenizer::train(a, 301), "a").hash(),
            Tokenizer::parse(Tokenizer::train(b, 300), "b").hash());
}

TEST(Tokenizer, PiecesHoldIndentationAndOneDigit) {
  WordCounts words;
  for (int i = 0; i < 50; ++i) words.add("\n        return 1234\n        return 12\n");
  const Tokenizer t = Tokenizer::parse(Tokenizer::train(words, 275), "test");
  EXPECT_EQ(t.vocab_size(), 275);
  EXPECT_EQ(t.encode("\n        return 1234").size(), 6U);  // the indented word, the space, four digits
}

// sentencepiece drops characters once the share of the others is 1 in float: with 256 in all, of which some occur once,
// that begins at 2^25 characters of text.
TEST(Tokenizer, EveryByteIsKeptHoweverLongTheText) {
  for (const std::int64_t count : {std::int64_t{1} << 25, std::int64_t{1} << 31, std::int64_t{1} << 50}) {
    WordCounts words;
    words.add(sample_code());
    words.counts["e"] = count;
    const Tokenizer t = Tokenizer::parse(Tokenizer::train(words, 300), "test");
    EXPECT_TRUE(t.lossless());
    for (int b = 0; b < 256; ++b)
      EXPECT_EQ(t.decode(t.encode(std::string(1, static_cast<char>(b)))), std::string(1, static_cast<char>(b)));
  }
}

// A text of a hundred thousand different words, as encoded bytes are, is as good as one of few: enough of them are
// taken, in bounded time.
TEST(Tokenizer, AnyNumberOfWordsIsEnough) {
  WordCounts words;
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    std::string word = " ";
    for (int j = 0; j < 12; ++j) word += static_cast<char>('a' + random() % 26);
    words.add(word);
  }
  EXPECT_EQ(Tokenizer::parse(Tokenizer::train(words, 280), "test").vocab_size(), 280);
}

TEST(Tokenizer, RefusesImpossibleVocabularies) {
  WordCounts words;
  words.add("ab ab");
  expect_contains(sentence<UsageError>([&] { Tokenizer::train(words, 100); }), {"vocab_size is 100", "at least 262"});
  const std::string said = sentence<UsageError>([&] { Tokenizer::train(words, 4096); });
  expect_contains(said, {"vocab_size is 4096", "5 bytes", "at most 26"});
  const std::int64_t most = std::stoll(said.substr(said.find("at most ") + 8));
  EXPECT_EQ(Tokenizer::parse(Tokenizer::train(words, most), "most").vocab_size(), most);
  EXPECT_NE(sentence<UsageError>([&] { Tokenizer::train(words, most + 1); }), "");
}

TEST(Tokenizer, TakesOtherModelsThatKeepText) {
  const Tokenizer t = Tokenizer::parse(train_plain({}), "plain.model");
  EXPECT_FALSE(t.lossless());
  EXPECT_FALSE(t.has_fim());
  EXPECT_GE(t.eot(), 0);
  for (const std::string text : {"def  f(self):\r\n\treturn \xE2\x82\xAC\n\n", "  <|endoftext|> <0x41> ", "\n\n\n"}) {
    EXPECT_EQ(t.decode(t.encode(text)), text);
  }
  std::string text;  // several stretches, with characters of the alphabet and others
  while (text.size() < 10000) text += "def f(self): \xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\n    value  ";
  EXPECT_EQ(t.decode(t.encode(text)), text);
  EXPECT_NE(t.decode(t.encode("\xE2\x96\x81")), "\xE2\x96\x81");  // so it is not lossless, and prepare() compares
}

TEST(Tokenizer, RefusesModelsThatChangeText) {
  TempDir dir;
  write_bytes(dir / "garbage.model", "this is no model");
  expect_contains(sentence([&] { Tokenizer::load(dir / "garbage.model"); }),
                  {"garbage.model", "not a sentencepiece model"});
  expect_contains(sentence([&] { Tokenizer::load(dir / "absent.model"); }), {"absent.model", "no such file"});
  const auto parse = [](const std::unordered_map<std::string, std::string>& changes) {
    return sentence([&] { Tokenizer::parse(train_plain(changes), "m.model"); });
  };
  expect_contains(parse({{"add_dummy_prefix", "true"}}), {"m.model", "changes text", "--add_dummy_prefix=false"});
  expect_contains(parse({{"normalization_rule_name", "nmt_nfkc"}}), {"m.model", "changes text"});
  expect_contains(parse({{"control_symbols", ""}, {"user_defined_symbols", "<|endoftext|>"}}),
                  {"m.model", "<|endoftext|> would be read from text"});
  expect_contains(parse({{"control_symbols", ""}, {"eos_id", "-1"}}), {"m.model", "neither <|endoftext|>"});
}

}  // namespace
}  // namespace onescale

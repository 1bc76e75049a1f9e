#include "data/fim.h"

#include <cmath>

#include "tests/data/helpers.h"

namespace onescale {
namespace {

std::string text_of(const FimParts& parts) {
  return std::string(parts.prefix) + std::string(parts.middle) + std::string(parts.suffix);
}

// Of n draws with probability p the share lies within 3 sqrt(p (1 - p) / n) of p in 99.7% of all seeds; these seeds are
// among them.
void expect_share(int hits, int n, double p) {
  EXPECT_NEAR(hits / static_cast<double>(n), p, 3 * std::sqrt(p * (1 - p) / n));
}

TEST(Fim, PartsAreTheDocumentAndSharesAreTheRates) {
  std::mt19937 random(1);
  for (const FimRates rates : {FimRates{0.5, 0.5}, FimRates{0.9, 0.25}}) {
    constexpr int n = 10000;
    int transformed = 0, spm = 0;
    for (int i = 0; i < n; ++i) {
      const std::string text = arbitrary_text(random, 12);
      const FimParts parts = fim_split(text, rates, 7, i);
      ASSERT_EQ(text_of(parts), text);
      if (parts.mode == FimMode::none) {
        ASSERT_EQ(parts.prefix, text);
      }
      transformed += parts.mode != FimMode::none;
      spm += parts.mode == FimMode::spm;
    }
    expect_share(transformed, n, rates.fim);
    expect_share(spm, transformed, rates.spm);
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(fim_split("abc", {0, 0.5}, 1, i).mode, FimMode::none);
    EXPECT_EQ(fim_split("abc", {1, 0}, 1, i).mode, FimMode::psm);
    EXPECT_EQ(fim_split("abc", {1, 1}, 1, i).mode, FimMode::spm);
  }
}

TEST(Fim, CutsKeepCharactersWhole) {
  std::string text;
  for (int i = 0; i < 50; ++i) text += "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";
  for (int i = 0; i < 2000; ++i) {
    const FimParts parts = fim_split(text, {1, 0.5}, 3, i);
    for (const std::string_view part : {parts.prefix, parts.middle, parts.suffix}) {
      ASSERT_TRUE(part.empty() || (static_cast<std::uint8_t>(part[0]) & 0xC0) != 0x80) << "document " << i;
    }
  }
}

// The two cuts are independent and uniform on the 101 positions of 100 bytes, so the middle has mean length 33.3 and a
// part is often empty.
TEST(Fim, CutsAreUniform) {
  const std::string text(100, 'x');
  constexpr int n = 20000;
  double prefix = 0, middle = 0;
  bool start = false, end = false;
  for (int i = 0; i < n; ++i) {
    const FimParts parts = fim_split(text, {1, 0.5}, 5, i);
    prefix += static_cast<double>(parts.prefix.size()) / n;
    middle += static_cast<double>(parts.middle.size()) / n;
    start |= parts.prefix.empty();
    end |= parts.suffix.empty();
  }
  // E|a - b| = (m^2 - 1) / (3 m) with m = 101 positions; the standard deviation of one length is below 24.
  EXPECT_NEAR(middle, (101.0 * 101 - 1) / 303, 3 * 24 / std::sqrt(n));
  EXPECT_NEAR(prefix, (100 - (101.0 * 101 - 1) / 303) / 2, 3 * 24 / std::sqrt(n));
  EXPECT_TRUE(start && end);
}

TEST(Fim, DependsOnSeedAndDocumentAlone) {
  const std::string text(1000, 'x');
  int same_seed = 0, same_document = 0;
  for (int i = 0; i < 100; ++i) {
    const FimParts a = fim_split(text, {1, 0.5}, 1, i), b = fim_split(text, {1, 0.5}, 1, i);
    EXPECT_TRUE(a.mode == b.mode && a.prefix == b.prefix && a.middle == b.middle);
    same_seed += a.prefix == fim_split(text, {1, 0.5}, 2, i).prefix;
    same_document += a.prefix == fim_split(text, {1, 0.5}, 1, i + 1000).prefix;
  }
  EXPECT_LT(same_seed, 5);
  EXPECT_LT(same_document, 5);
}

TEST(Fim, OrdersOfTheParts) {
  const Tokenizer& t = tiny_tokenizer();
  const auto ids = [&](const FimParts& parts) {
    std::vector<std::string> out;
    for (const FimSegment& s : fim_segments(parts, t)) {
      out.push_back(s.id == t.fim_prefix()   ? "<P>"
                    : s.id == t.fim_suffix() ? "<S>"
                    : s.id == t.fim_middle() ? "<M>"
                                             : std::string(s.text));
    }
    return out;
  };
  using Strings = std::vector<std::string>;
  EXPECT_EQ(ids({FimMode::none, "abc", {}, {}}), (Strings{"abc"}));
  EXPECT_EQ(ids({FimMode::psm, "p", "m", "s"}), (Strings{"<P>", "p", "<S>", "s", "<M>", "m"}));
  EXPECT_EQ(ids({FimMode::spm, "p", "m", "s"}), (Strings{"<P>", "<S>", "s", "<M>", "p", "m"}));
  const std::vector<std::int32_t> prompt = infill_prompt(t, "def", "return");
  std::vector<std::int32_t> expected = {t.fim_prefix()};
  for (const std::int32_t id : t.encode("def")) expected.push_back(id);
  expected.push_back(t.fim_suffix());
  for (const std::int32_t id : t.encode("return")) expected.push_back(id);
  expected.push_back(t.fim_middle());
  EXPECT_EQ(prompt, expected);
}

}  // namespace
}  // namespace onescale

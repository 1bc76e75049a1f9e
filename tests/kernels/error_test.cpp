#include "kernels/error.h"

#include <gtest/gtest.h>

#include "tests/temp_dir.h"

namespace onescale {
namespace {

TEST(Sentence, IsNeverLongerThan400Bytes) {
  const std::string value(1'000'000, 'v'), path = "/a/" + std::string(5000, 'p') + "/end";
  EXPECT_EQ(sentence([&] { throw Error(value); }).size(), 400U);
  EXPECT_EQ(sentence([&] { throw UsageError(std::string(400, 'x')); }), std::string(400, 'x'));
  // Where, which value and what to do stay, whatever stands between.
  const std::string said =
      sentence([&] { check(false, path, ":3: lr is '", value, "' in ", path, ": give a number"); });
  EXPECT_LE(said.size(), 400U);
  for (const char* part : {"/a/pp", "pp/end:3: lr is 'vv", "...", "vv' in /a/pp", "pp/end: give a number"})
    EXPECT_NE(said.find(part), std::string::npos) << part << "\n" << said;
  // One that fits keeps its values whole.
  const std::string long_path(300, 'p');
  EXPECT_EQ(sentence([&] { check(false, long_path, ": x"); }), long_path + ": x");
}

TEST(Sentence, IsOneLineAndCutBetweenCharacters) {
  EXPECT_EQ(sentence([] { throw Error("a\nb\tc\x1b[1m\x7f"); }), "a?b?c?[1m?");
  for (const std::string character : {"\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"}) {  // of 2, 3 and 4 bytes
    for (int shift = 0; shift < 4; ++shift) {
      std::string text(static_cast<std::size_t>(shift), 'x');
      for (int i = 0; i < 500; ++i) text += character;
      const std::string cut = shortened(text), dots = "...";
      EXPECT_LE(cut.size(), 400U);
      EXPECT_GT(cut.size(), 390U);
      const std::size_t middle = cut.find(dots);
      EXPECT_EQ((middle - static_cast<std::size_t>(shift)) % character.size(), 0U);
      EXPECT_EQ((cut.size() - middle - dots.size()) % character.size(), 0U);
    }
  }
}

}  // namespace
}  // namespace onescale

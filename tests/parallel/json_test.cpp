#include "parallel/json.h"

#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <limits>

#include "tests/temp_dir.h"

namespace onescale {
namespace {

TEST(Json, ReadsEveryType) {
  const Json json =
      Json::parse(R"({"i": -9223372036854775808, "d": 1e-05, "s": "a\u00e9\"", "b": true, "n": null, "a": [1, 2.5, "x"],
                                   "o": {"k": false}})",
                  "f.json");
  EXPECT_EQ(json.at("i").integer(), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(json.at("d").number(), 1e-5);
  EXPECT_EQ(json.at("i").number(), -0x1p63);
  EXPECT_EQ(json.at("s").string(), "a\xc3\xa9\"");
  EXPECT_TRUE(json.at("b").boolean());
  EXPECT_TRUE(json.at("n").is_null() && json.has("n") && !json.has("m"));
  EXPECT_EQ(json.at("a").size(), 3);
  EXPECT_EQ(json.at("a").at(1).number(), 2.5);
  EXPECT_FALSE(json.at("o").at("k").boolean());
  std::string order;  // that of the text
  for (const auto& [key, value] : json.items()) order += key + (value.is_null() ? "0" : "");
  EXPECT_EQ(order, "idsbn0ao");
  EXPECT_EQ(sentence([&] { json.items()[6].second.at("k").string(); }), "f.json: o.k is false, expected a string");
}

TEST(Json, WritesWhatReadsBackEqual) {
  Json json = Json::object(), list = Json::array();
  const std::vector<double> values = {0.1, 1e-300, 3.0, -0.0, 1.7976931348623157e308, 5e-324, 2.0 / 3.0};
  for (double v : values) list.push(v);
  json.set("list", list);
  json.set("text", std::string("line\nNUL\0end", 12));
  json.set("literal", "not a bool");
  json.set("big", std::numeric_limits<std::int64_t>::max());
  json.set("yes", true);
  json.set("none", nullptr);
  for (int indent : {-1, 2}) {
    const Json back = Json::parse(json.dump(indent), "back");
    for (std::int64_t i = 0; i < back.at("list").size(); ++i) {
      EXPECT_EQ(back.at("list").at(i).number(), values[static_cast<std::size_t>(i)]);
    }
    EXPECT_EQ(back.at("text").string(), std::string("line\nNUL\0end", 12));
    EXPECT_EQ(back.at("literal").string(), "not a bool");
    EXPECT_EQ(back.at("big").integer(), std::numeric_limits<std::int64_t>::max());
    EXPECT_TRUE(back.at("yes").boolean());
    EXPECT_TRUE(back.at("none").is_null());
  }
  EXPECT_EQ(json.dump().find('\n'), std::string::npos);
}

TEST(Json, BytesThatAreNotUtf8AreWrittenReplaced) {
  Json json = Json::object();
  json.set("sample", std::string("\xff\xfe ok"));
  EXPECT_EQ(Json::parse(json.dump(), "back").at("sample").string(), "\xef\xbf\xbd\xef\xbf\xbd ok");
}

TEST(Json, RefusesWhatIsNotJsonAndSaysWhere) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{\"a\": 1,\n \"b\": nul}", "f.json: line 2, column 10"},
      {"{\"a\": 1,\n\n  }", "f.json: line 3, column 3"},
      {"", "f.json: line 1, column 1"},
      {"{\"a\": [1, 2}", "f.json: line 1, column 12"},
      {"{\"a\": 1} x", "f.json: line 1, column 10"},
      {"{\"a\": \"\xff\"}", "f.json: line 1, column 8"},
      {std::string("{}\n\0x", 5), "f.json: line 2, column 1: not valid JSON: a NUL byte"},
      {"{\"a\": 1e999}", "f.json: line 1"},
      {"{\"a\": 1,\n \"b\": 2,\n \"a\": 3}", "f.json: line 3, column 5: the key \"a\" appears twice"},
      {"{\"o\": {\"x\": 1, \"x\": 2}}", "f.json: line 1, column 19: the key \"x\" appears twice"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string said = sentence([&, &text = text] { Json::parse(text, "f.json"); });
    EXPECT_EQ(said.substr(0, expected.size()), expected) << text << "\n" << said;
  }
  // The same key in two objects is no duplicate, nor is a key that was used in an object already closed.
  EXPECT_EQ(sentence([] { Json::parse(R"({"a": {"k": 1}, "b": {"k": 2}, "k": [{"a": 1}, {"a": 2}]})", "f"); }), "");
}

TEST(Json, WrongTypesNameFileKeyAndValue) {
  const Json json = Json::parse(R"({"h": "12", "d": 1.5, "u": 18446744073709551615, "m": {"x": [true]}})", "c.json");
  EXPECT_EQ(sentence([&] { json.at("h").integer(); }), "c.json: h is \"12\", expected a whole number");
  EXPECT_EQ(sentence([&] { json.at("d").integer(); }), "c.json: d is 1.5, expected a whole number");
  EXPECT_EQ(sentence([&] { json.at("u").integer(); }),
            "c.json: u is 18446744073709551615, which does not fit in 64 bits");
  EXPECT_EQ(sentence([&] { json.at("m").at("x").at(0).number(); }), "c.json: m.x[0] is true, expected a number");
  EXPECT_EQ(sentence([&] { json.at("m").boolean(); }), "c.json: m is {\"x\":[true]}, expected true or false");
  EXPECT_EQ(sentence([&] { json.at("none"); }), "c.json has no key \"none\"");
  EXPECT_EQ(sentence([&] { json.at("m").at("x").at(1); }), "c.json: m.x has 1 elements, none at index 1");
  EXPECT_EQ(sentence([&] { json.at("h").at("k"); }), "c.json: h is \"12\", expected an object with the key \"k\"");
  EXPECT_EQ(sentence([&] { json.at("h").items(); }), "c.json: h is \"12\", expected an object");
}

TEST(Json, CopiesShareAndSetCopies) {
  Json a = Json::object();
  Json b = a;
  b.set("x", 1);
  EXPECT_EQ(a.at("x").integer(), 1);
  Json holder = Json::object();
  holder.set("inner", a);
  a.set("x", 2);
  EXPECT_EQ(holder.at("inner").at("x").integer(), 1);
}

TEST(Json, ReadsFiles) {
  const TempDir dir;
  const std::string path = dir / "json_test.json";
  std::ofstream(path) << "{\"a\": 7}";
  EXPECT_EQ(Json::read_file(path).at("a").integer(), 7);
  std::ofstream(path) << "{\n\"a\": }";
  EXPECT_NE(sentence([&] { Json::read_file(path); }).find(path + ": line 2, column 6"), std::string::npos);
  EXPECT_NE(sentence([&] { Json::read_file(path + ".none"); }).find(path + ".none"), std::string::npos);
  EXPECT_NE(sentence([&] { Json::read_file(dir.path()); }), "");
}

// 100 brackets in each other are more than any file that is read here has; what is shown, copied or compared goes
// through them by recursion.
TEST(Json, NestingIsBounded) {
  const auto nested = [](std::size_t depth, const std::string& open, const std::string& inside, char close) {
    std::string text;
    for (std::size_t i = 0; i < depth; ++i) text += open;
    return text + inside + std::string(depth, close);
  };
  const Json arrays = Json::parse(nested(100, "[", "", ']'), "f.json");
  EXPECT_EQ(arrays.dump(), nested(100, "[", "", ']'));
  EXPECT_EQ(Json::parse(nested(100, "{\"k\":", "1", '}'), "f.json").dump(), nested(100, "{\"k\":", "1", '}'));
  for (const std::size_t depth : {std::size_t{101}, std::size_t{80'000}, std::size_t{5'000'000}}) {
    EXPECT_EQ(sentence([&] { Json::parse(nested(depth, "[", "", ']'), "f.json"); }),
              "f.json: line 1, column 101: brackets are nested deeper than 100; flatten them");
    EXPECT_EQ(sentence([&] { Json::parse(nested(depth, "{\"k\":", "1", '}'), "f.json"); }),
              "f.json: line 1, column 501: brackets are nested deeper than 100; flatten them");
  }
  EXPECT_NE(sentence([&] { Json::parse(std::string(200'000, '['), "f.json"); }), "");
}

// Each of these would take minutes if a key, a bracket or a character cost as much as what was read before it.
TEST(Json, ReadsInLinearTime) {
  std::string keys = "{", lines;
  for (int i = 0; i < 200'000; ++i) keys += str("\"key ", i, "\":\n", i, ",");
  const std::clock_t begin = std::clock();
  const Json json = Json::parse(keys + "\"last\":0}", "f.json");
  std::int64_t sum = 0;
  for (const auto& [key, value] : json.items()) sum += value.integer();
  EXPECT_EQ(sum, std::int64_t{199'999} * 100'000);
  EXPECT_EQ(sentence([&] { Json::parse(keys + "\"key 7\":0}", "f.json"); }),
            "f.json: line 200001, column 15: the key \"key 7\" appears twice in one object; keep one of them");
  EXPECT_EQ(sentence([&] { Json::parse("{\"" + std::string(10'000'000, 'k') + "\": x}", "f.json"); }).substr(0, 63),
            "f.json: line 1, column 10000006: not valid JSON: syntax error w");
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 20);
}

}  // namespace
}  // namespace onescale

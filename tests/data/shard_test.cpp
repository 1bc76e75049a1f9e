#include "data/shard.h"

#include <cstring>
#include <functional>

#include "tests/data/helpers.h"

namespace onescale {
namespace {

constexpr std::int64_t header_bytes = 1024;

Vocabulary vocabulary(std::int64_t size) {
  return {size, 1, {11, 22, 33, 44}};
}

std::vector<std::int32_t> read_all(const Shard& shard) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(shard.tokens()));
  std::vector<std::uint8_t> no_target(ids.size());
  shard.read(0, shard.tokens(), ids.data(), no_target.data());
  return ids;
}

template <class T>
T at(const std::string& bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

void set32(std::string& bytes, std::size_t word, std::int32_t value) {
  std::memcpy(bytes.data() + 4 * word, &value, 4);
}

// A file as llm.c's scripts write it.
std::string plain_file(const std::vector<std::uint16_t>& tokens) {
  std::string bytes(header_bytes, '\0');
  set32(bytes, 0, 20240520), set32(bytes, 1, 1), set32(bytes, 2, static_cast<std::int32_t>(tokens.size()));
  bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
  return bytes;
}

// A file of our own whose tokens are a hole but for the last four.
void write_sparse(const std::string& path, std::int64_t tokens) {
  std::string header(header_bytes, '\0');
  set32(header, 0, 20240520), set32(header, 1, 1),
      set32(header, 2, tokens < (std::int64_t{1} << 31) ? static_cast<std::int32_t>(tokens) : -1);
  set32(header, 3, 100), set32(header, 4, 1), set32(header, 5, 3), set32(header, 16, 99);
  std::memcpy(header.data() + 4 * 14, &tokens, 8);
  write_bytes(path, header);
  ASSERT_EQ(::truncate(path.c_str(), header_bytes + 2 * tokens), 0);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const std::array<std::uint16_t, 4> last = {5, 6, 7, 99};
  file.seekp(header_bytes + 2 * (tokens - 4));
  file.write(reinterpret_cast<const char*>(last.data()), 8);
}

TEST(Shard, WritesTheDocumentedBytes) {
  TempDir dir;
  ShardWriter writer(dir / "a.bin", vocabulary(1000));
  add_document(writer, std::vector<std::int32_t>{1, 2, 3});
  writer.add(std::vector<std::int32_t>{1});
  writer.add(std::vector<std::int32_t>{});
  writer.add(std::vector<std::int32_t>{999});
  writer.end_document();
  writer.finish();
  const std::string bytes = read_text(dir / "a.bin");
  ASSERT_EQ(bytes.size(), 1024U + 2 * 5);
  const std::vector<std::int32_t> header = {20240520, 1, 5, 1000, 1, 3, 11, 22, 33, 44, 0, 0, 0, 0, 5, 0, 999, 0};
  for (std::size_t i = 0; i < header.size(); ++i) EXPECT_EQ(at<std::int32_t>(bytes, 4 * i), header[i]) << "word " << i;
  const std::vector<std::uint16_t> tokens = {1, 2, 3, 1, 999};
  EXPECT_EQ(std::memcmp(bytes.data() + 1024, tokens.data(), 10), 0);
  const std::string ends = read_text(dir / "a.docs");
  ASSERT_EQ(ends.size(), 16U);
  EXPECT_EQ(at<std::uint64_t>(ends, 0), 3U);
  EXPECT_EQ(at<std::uint64_t>(ends, 8), 5U);
  EXPECT_FALSE(std::filesystem::exists(dir / "a.mask"));

  const Shard shard(dir / "a.bin", vocabulary(1000));
  EXPECT_EQ(read_all(shard), (std::vector<std::int32_t>{1, 2, 3, 1, 999}));
  EXPECT_EQ(shard.vocabulary().hash, vocabulary(1000).hash);
}

TEST(Shard, LargeVocabulariesUseFourBytes) {
  TempDir dir;
  ShardWriter writer(dir / "a.bin", vocabulary(70000));
  add_document(writer, std::vector<std::int32_t>{1, 69999, 65536});
  writer.finish();
  const std::string bytes = read_text(dir / "a.bin");
  EXPECT_EQ(at<std::int32_t>(bytes, 0), 20240801);
  EXPECT_EQ(at<std::int32_t>(bytes, 4), 7);
  EXPECT_EQ(bytes.size(), 1024U + 12);
  EXPECT_EQ(read_all(Shard(dir / "a.bin", vocabulary(70000))), (std::vector<std::int32_t>{1, 69999, 65536}));
}

TEST(Shard, MaskMarksTokens) {
  TempDir dir;
  ShardWriter writer(dir / "a.bin", vocabulary(1000));
  add_document(writer, std::vector<std::int32_t>(13, 4));
  add_document(writer, std::vector<std::int32_t>{1, 5, 6, 7}, std::vector<std::uint8_t>{0, 1, 1, 0});
  add_document(writer, std::vector<std::int32_t>(10, 4));
  writer.finish();
  EXPECT_EQ(read_text(dir / "a.mask"), std::string("\0\xC0\0\0", 4));  // bits 14 and 15 of 27
  const Shard shard(dir / "a.bin", vocabulary(1000));
  std::vector<std::int32_t> ids(27);
  std::vector<std::uint8_t> mask(27);
  shard.read(0, 27, ids.data(), mask.data());
  for (std::size_t i = 0; i < 27; ++i) EXPECT_EQ(mask[i], i == 14 || i == 15) << i;
  write_bytes(dir / "a.mask", "abc");
  expect_contains(sentence([&] { Shard(dir / "a.bin", vocabulary(1000)); }),
                  {"a.mask", "27 tokens", "4 bytes", "has 3"});
}

TEST(Shard, RefusesIdsOutsideTheVocabularyWhenWriting) {
  TempDir dir;
  ShardWriter writer(dir / "a.bin", vocabulary(100));
  expect_contains(sentence([&] { add_document(writer, std::vector<std::int32_t>{100}); }),
                  {"a.bin", "id 100", "vocabulary of 100"});
  expect_contains(sentence([&] { add_document(writer, std::vector<std::int32_t>{-1}); }), {"a.bin", "id -1"});
}

TEST(Shard, AFullDiskIsOneSentence) {
  TempDir dir;
  std::filesystem::create_symlink("/dev/full", dir / "a.bin");
  expect_contains(sentence([&] {
                    ShardWriter writer(dir / "a.bin", vocabulary(100));
                    add_document(writer, std::vector<std::int32_t>(10'000, 5));
                    writer.finish();
                  }),
                  {dir / "a.bin: cannot write", "No space left on device", "free some space"});
}

TEST(Shard, ReadsPlainFilesAndFindsTheFirstBadId) {
  TempDir dir;
  write_bytes(dir / "plain.bin", plain_file({50256, 1, 2, 50000}));
  const Shard shard(dir / "plain.bin", vocabulary(50257));
  EXPECT_EQ(read_all(shard), (std::vector<std::int32_t>{50256, 1, 2, 50000}));
  EXPECT_EQ(shard.vocabulary().size, 0);
  expect_contains(sentence([&] { Shard(dir / "plain.bin", vocabulary(50256)); }),
                  {"plain.bin", "id 50256", "byte 1024", "size 50256"});

  std::vector<std::uint16_t> tokens(3'000'000, 9);  // two bad ids
  tokens[1'500'000] = 60000, tokens[2'900'000] = 60001;
  write_bytes(dir / "long.bin", plain_file(tokens));
  expect_contains(sentence([&] { Shard(dir / "long.bin", vocabulary(50257)); }),
                  {"long.bin", "id 60000", "byte 3001024"});
}

TEST(Shard, GoesBeyondTwoAndFourGibibytes) {
  TempDir dir;
  for (const std::int64_t tokens : {(std::int64_t{1} << 30) + 5, (std::int64_t{1} << 31) + 7}) {
    write_sparse(dir / "big.bin", tokens);
    const Shard shard(dir / "big.bin", {});
    EXPECT_EQ(shard.tokens(), tokens);
    std::array<std::int32_t, 5> last{};
    std::array<std::uint8_t, 5> no_target{};
    shard.read(tokens - 5, 5, last.data(), no_target.data());
    EXPECT_EQ(last, (std::array<std::int32_t, 5>{0, 5, 6, 7, 99}));
  }
}

TEST(Shard, EachDamageIsOneSentence) {
  TempDir dir;
  ShardWriter writer(dir / "a.bin", vocabulary(1000));
  add_document(writer, std::vector<std::int32_t>{1, 2, 3, 4, 5});
  writer.finish();
  const std::string good = read_text(dir / "a.bin");
  struct Case {
    const char* name;
    std::function<void(std::string&)> damage;
    Vocabulary expected;
    std::vector<std::string> parts;
  };
  const auto nothing = [](std::string&) {};
  Vocabulary other = vocabulary(1000);
  other.hash[2] = 34;
  const std::vector<Case> cases = {
      {"empty", [](std::string& b) { b.clear(); }, vocabulary(1000), {"begins with 1024 bytes", "has 0"}},
      {"half a header", [](std::string& b) { b.resize(500); }, vocabulary(1000), {"has 500"}},
      {"truncated",
       [](std::string& b) { b.resize(b.size() - 3); },
       vocabulary(1000),
       {"promises 5 tokens", "there are 7 bytes"}},
      {"one byte short",
       [](std::string& b) { b.pop_back(); },
       vocabulary(1000),
       {"promises 5 tokens", "there are 9 bytes"}},
      {"longer", [](std::string& b) { b += "xx"; }, vocabulary(1000), {"promises 5 tokens", "there are 12 bytes"}},
      {"magic", [](std::string& b) { set32(b, 0, 7); }, vocabulary(1000), {"magic 7 and version 1"}},
      {"version", [](std::string& b) { set32(b, 1, 2); }, vocabulary(1000), {"version 2"}},
      {"unfinished", [](std::string& b) { b.replace(0, 1024, 1024, '\0'); }, vocabulary(1000), {"magic 0"}},
      {"counts differ", [](std::string& b) { set32(b, 14, 6); }, vocabulary(1000), {"two numbers of tokens, 5 and 6"}},
      {"negative count",
       [](std::string& b) { set32(b, 2, -7), set32(b, 5, 0); },
       vocabulary(1000),
       {"promises -7 tokens"}},
      {"absurd count",
       [](std::string& b) { set32(b, 2, -1), set32(b, 14, -1), set32(b, 15, 0x7FFFFFFF); },
       vocabulary(1000),
       {"promises 9223372036854775807"}},
      {"hash", nothing, other, {"another tokenizer"}},
      {"vocabulary", nothing, {999, 1, vocabulary(1000).hash}, {"vocabulary of 1000", "has 999"}},
      {"largest id, really",
       [](std::string& b) { set32(b, 16, 1001), set32(b, 256 + 1, 1001 << 16 | 4); },
       vocabulary(1000),
       {"id 1001", "byte 1030", "size 1000"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    std::string bytes = good;
    c.damage(bytes);
    write_bytes(dir / "b.bin", bytes);
    const std::string said = sentence([&] { Shard(dir / "b.bin", c.expected); });
    expect_contains(said, {"b.bin"});
    expect_contains(said, c.parts);
  }
  expect_contains(sentence([&] { Shard(dir / "absent.bin", {}); }), {"absent.bin", "no such file"});
}

// What a resume compares: the same tokens give the same hash wherever the file lies, other tokens of the same number
// and vocabulary another one, in a file that is read whole and in one of which stretches are.
TEST(Shard, HashSeesOtherTokensOfTheSameNumber) {
  TempDir dir;
  const auto hash = [&](const std::string& name, std::size_t n, std::int32_t first, bool masked) {
    std::vector<std::int32_t> ids(n);
    for (std::size_t i = 0; i < n; ++i)
      ids[i] = static_cast<std::int32_t>((i * 7 + static_cast<std::size_t>(first)) % 1000);
    ShardWriter writer(dir / name, vocabulary(1000));
    add_document(writer, {ids.data(), 1});
    add_document(writer, {ids.data() + 1, n - 1}, std::vector<std::uint8_t>(n - 1, masked ? 1 : 0));
    writer.finish();
    return Shard(dir / name, vocabulary(1000)).hash(5);
  };
  for (const std::size_t n : {std::size_t{10}, std::size_t{2'000'000}}) {
    const std::uint64_t first = hash("a.bin", n, 0, false);
    EXPECT_EQ(hash("b.bin", n, 0, false), first);
    EXPECT_NE(hash("c.bin", n, 1, false), first);
    EXPECT_NE(hash("d.bin", n, 0, true), first);
    EXPECT_NE(hash("e.bin", n + 1, 0, false), first);
  }
}

// The bytes of Megatron's MMapIndexedDataset (reference/data-formats.md): three sequences of 2, 0 and 3 tokens.
TEST(Shard, ReadsMegatronsFiles) {
  TempDir dir;
  const auto index = [](std::uint8_t type, std::int64_t width, std::int64_t third_length) {
    std::string out("MMIDIDX\0\0", 9);
    const auto put = [&](auto value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); };
    put(std::uint64_t{1}), put(type), put(std::uint64_t{3}), put(std::uint64_t{4});
    for (const std::int64_t length : {std::int64_t{2}, std::int64_t{0}, third_length})
      put(static_cast<std::int32_t>(length));
    for (const std::int64_t at : {0, 2, 2}) put(at * width);
    for (const std::int64_t document : {0, 1, 2, 3}) put(document);
    return out;
  };
  const auto data = [](auto... ids) { return (std::string(reinterpret_cast<const char*>(&ids), sizeof ids) + ...); };
  using u16 = std::uint16_t;
  write_bytes(dir / "train_a.bin", data(u16{7}, u16{8}, u16{9}, u16{65000}, u16{11}));
  write_bytes(dir / "train_a.idx", index(8, 2, 3));
  const std::vector<std::int32_t> expected = {7, 8, 9, 65000, 11};
  EXPECT_EQ(read_all(Shard(dir / "train_a.bin", {})), expected);
  EXPECT_EQ(read_all(Shard(dir / "train_a.bin", vocabulary(65001))), expected);
  expect_contains(sentence([&] { Shard(dir / "train_a.bin", vocabulary(65000)); }),
                  {"train_a.bin", "id 65000", "byte 6", "size 65000"});
  write_bytes(dir / "train_b.bin", data(7, 8, 9, 65000, 11));
  write_bytes(dir / "train_b.idx", index(4, 4, 3));
  EXPECT_EQ(read_all(Shard(dir / "train_b.bin", {})), expected);

  write_bytes(dir / "train_a.idx", index(8, 2, 4));
  expect_contains(sentence([&] { Shard(dir / "train_a.bin", {}); }), {"train_a.bin", "10 bytes", "describes 12"});
  write_bytes(dir / "train_a.idx", index(8, 3, 3));
  expect_contains(sentence([&] { Shard(dir / "train_a.bin", {}); }), {"train_a.idx", "sequence 1", "byte 6", "4 was"});
  for (const std::string& damaged : {index(8, 2, 3).substr(0, 50), index(6, 2, 3), std::string("MMIDIDX")}) {
    write_bytes(dir / "train_a.idx", damaged);
    expect_contains(sentence([&] { Shard(dir / "train_a.bin", {}); }), {"train_a.idx", "no Megatron index"});
  }
}

// One that is cut off while it is read, of which a mapping would be a signal.
TEST(Shard, OneThatIsShortenedLaterIsASentence) {
  TempDir dir;
  for (const bool masked : {false, true}) {
    ShardWriter writer(dir / "a.bin", vocabulary(1000));
    add_document(writer, std::vector<std::int32_t>(100'000, 7), std::vector<std::uint8_t>(100'000, masked));
    writer.finish();
    const Shard shard(dir / "a.bin", vocabulary(1000));
    std::filesystem::resize_file(dir / (masked ? "a.mask" : "a.bin"), 2000);
    std::vector<std::int32_t> ids(100);
    std::vector<std::uint8_t> no_target(100);
    shard.read(0, 100, ids.data(), no_target.data());
    EXPECT_EQ(ids, std::vector<std::int32_t>(100, 7));
    expect_contains(sentence([&] { shard.read(90'000, 100, ids.data(), no_target.data()); }),
                    {masked ? "a.mask: ends at byte 11250" : "a.bin: ends at byte 181024", "truncated"});
  }
}

// The model may have more rows than the tokenizer has ids: those are no ids of this data.
TEST(Shard, IdsAreOfItsOwnVocabulary) {
  TempDir dir;
  ShardWriter writer(dir / "a.bin", vocabulary(1000));
  add_document(writer, std::vector<std::int32_t>{1, 2, 3});
  writer.finish();
  std::string bytes = read_text(dir / "a.bin");
  const std::uint16_t id = 1000;
  std::memcpy(bytes.data() + 1028, &id, 2);
  write_bytes(dir / "a.bin", bytes);
  const Shard shard(dir / "a.bin", vocabulary(1024));
  std::array<std::int32_t, 3> ids{};
  std::array<std::uint8_t, 3> mask{};
  expect_contains(sentence([&] { shard.read(0, 3, ids.data(), mask.data()); }),
                  {"a.bin", "id 1000", "byte 1028", "size 1000"});
}

// A flipped bit that the header does not know of is found when the token is read.
TEST(Shard, ReadChecksIds) {
  TempDir dir;
  ShardWriter writer(dir / "a.bin", vocabulary(1000));
  add_document(writer, std::vector<std::int32_t>{1, 2, 3});
  writer.finish();
  std::string bytes = read_text(dir / "a.bin");
  bytes[1024 + 5] = static_cast<char>(0x80);
  write_bytes(dir / "a.bin", bytes);
  const Shard shard(dir / "a.bin", vocabulary(1000));
  std::array<std::int32_t, 3> ids{};
  std::array<std::uint8_t, 3> mask{};
  const auto read = [&](std::int64_t first, std::int64_t count) {
    return sentence([&] { shard.read(first, count, ids.data(), mask.data()); });
  };
  expect_contains(read(0, 3), {"a.bin", "id 32771", "byte 1028"});
  expect_contains(read(2, 2), {"a.bin", "tokens 2 to 4"});
}

}  // namespace
}  // namespace onescale

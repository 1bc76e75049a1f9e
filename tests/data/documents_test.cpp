#include "data/documents.h"

#include "tests/data/helpers.h"

namespace onescale {
namespace {

struct Found {
  std::string source, text;
  std::size_t prompt_bytes;
  bool operator==(const Found&) const = default;
};
void PrintTo(const Found& f, std::ostream* out) {
  *out << f.source << ": " << f.text << " (" << f.prompt_bytes << ")";
}

std::vector<Found> all(Documents documents) {
  std::vector<Found> found;
  documents.each([&](const Document& d) {
    EXPECT_EQ(d.number, std::ssize(found));
    found.push_back({d.source, d.text, d.prompt_bytes});
  });
  return found;
}

TEST(Documents, WalksDirectoriesInOrder) {
  TempDir dir;
  const std::string binary("a\0b\r\n\xFF", 6);
  write_bytes(dir / "t/b.py", binary);
  write_bytes(dir / "t/a/z.py", "z");
  write_bytes(dir / "t/a/note.txt", "note");
  write_bytes(dir / "t/a.py", "a");
  write_bytes(dir / "t/empty.py", "");
  write_bytes(dir / "t/.git/hidden.py", "hidden");
  write_bytes(dir / "t/.hidden.py", "hidden");
  std::filesystem::create_directory_symlink(dir / "t", dir / "t/a/loop");
  std::filesystem::create_symlink(dir / "t/nowhere", dir / "t/dangling.py");
  using List = std::vector<Found>;
  const Found a{dir / "t/a.py", "a", 0}, b{dir / "t/b.py", binary, 0}, z{dir / "t/a/z.py", "z", 0},
      note{dir / "t/a/note.txt", "note", 0};
  EXPECT_EQ(all(Documents({dir / "t"}, {})), (List{a, note, z, b}));  // '.' sorts before '/'
  EXPECT_EQ(all(Documents({dir / "t"}, {"*.py"})), (List{a, z, b}));
  EXPECT_EQ(all(Documents({dir / "t"}, {"*.txt", "[b]*"})), (List{note, b}));
  EXPECT_EQ(all(Documents({dir / "t"}, {"a/*"})), (List{note, z}));
  EXPECT_EQ(all(Documents({dir / "t/b.py", dir / "t/a"}, {"*.txt"})),
            (List{b, note}));  // a named file needs no pattern
  Documents again({dir / "t"}, {});
  EXPECT_EQ(again.files(), 5);
  EXPECT_EQ(again.bytes(), 6 + 1 + 4 + 1);
  for (int pass = 0; pass < 2; ++pass) {
    int found = 0;
    again.each([&](const Document&) { ++found; });
    EXPECT_EQ(found, 4);
    EXPECT_EQ(again.bytes_read(), again.bytes());
  }
}

TEST(Documents, ReadsJsonLines) {
  TempDir dir;
  write_bytes(dir / "d.jsonl",
              "{\"text\": \"one\\nline\\u0000\", \"id\": 5}\n\n{\"prompt\": \"2+2\", \"completion\": "
              "\"=4\"}\r\n{\"text\": \"\"}\n{\"text\": \"last\"}");
  EXPECT_EQ(all(Documents({dir / "d.jsonl"}, {})),
            (std::vector<Found>{{dir / "d.jsonl line 1", std::string("one\nline\0", 9), 0},
                                {dir / "d.jsonl line 3", "2+2=4", 3},
                                {dir / "d.jsonl line 5", "last", 0}}));
}

TEST(Documents, BadInputIsOneSentence) {
  TempDir dir;
  const auto read = [&](const std::string& lines) {
    write_bytes(dir / "d.jsonl", lines);
    return sentence([&] { all(Documents({dir / "d.jsonl"}, {})); });
  };
  expect_contains(read("{\"text\": \"a\"}\n{\"text\": \"b\n"), {"d.jsonl line 2", "correct it"});
  expect_contains(read("{\"text\": \"a\"}\n\n{\"txt\": \"b\"}\n"), {"d.jsonl line 3", "\"text\"", "correct the line"});
  expect_contains(read("{\"prompt\": \"a\"}\n"), {"d.jsonl line 1", "\"completion\""});
  expect_contains(read("[1]\n"), {"d.jsonl line 1"});
  expect_contains(read("{\"text\": 5}\n"), {"d.jsonl line 1", "text"});
  expect_contains(sentence<UsageError>([&] { Documents({dir / "absent"}, {}); }), {"absent", "does not exist"});
  expect_contains(sentence<UsageError>([&] { Documents({}, {}); }), {"No input"});
  write_bytes(dir / "t/a.txt", "a");
  expect_contains(sentence<UsageError>([&] {
                    Documents({dir / "t"}, {"*.py", "*.c"});
                  }),
                  {"/t", "*.py *.c", "nothing to prepare"});
  write_bytes(dir / "t/a.txt", "");
  expect_contains(sentence<UsageError>([&] { Documents({dir / "t"}, {}); }), {"1 files", "no bytes"});
}

TEST(Documents, AByteOrderMarkBeforeJsonLinesIsNoText) {
  TempDir dir;
  write_bytes(dir / "a.jsonl", "\xEF\xBB\xBF{\"text\": \"a\"}\r\n{\"text\": \"\\ufeffb\"}\r\n");
  write_bytes(dir / "b.jsonl", "\xEF\xBB\xBF\n{\"text\": \"c\"}");
  write_bytes(dir / "c.txt", "\xEF\xBB\xBFtext");  // any bytes are kept
  const std::vector<Found> expected = {{dir / "a.jsonl line 1", "a", 0},
                                       {dir / "a.jsonl line 2",
                                        "\xEF\xBB\xBF"
                                        "b",
                                        0},
                                       {dir / "b.jsonl line 2", "c", 0},
                                       {dir / "c.txt", "\xEF\xBB\xBFtext", 0}};
  EXPECT_EQ(all(Documents({dir.path()}, {})), expected);
}

TEST(Documents, FingerprintSeesContentsWhereverTheyLie) {
  TempDir dir;
  write_bytes(dir / "t/a", "12");
  const auto fingerprint = [&] { return Documents({dir / "t"}, {}).fingerprint(); };
  const std::string first = fingerprint();
  EXPECT_EQ(first, fingerprint());
  write_bytes(dir / "t/a", "21");
  EXPECT_NE(first, fingerprint());
  write_bytes(dir / "t/a", "123");
  EXPECT_NE(first, fingerprint());
  write_bytes(dir / "t/a", "12");
  EXPECT_EQ(first, fingerprint());
  std::filesystem::rename(dir / "t/a", dir / "t/b");
  EXPECT_EQ(first, fingerprint());
  write_bytes(dir / "t/b", "1");  // the same bytes in two documents
  write_bytes(dir / "t/c", "2");
  EXPECT_NE(first, fingerprint());
  std::filesystem::remove(dir / "t/c");
  write_bytes(dir / "t/b", "12");
  std::filesystem::rename(dir / "t/b", dir / "t/b.jsonl");  // the same bytes as JSON
  EXPECT_NE(first, fingerprint());
}

}  // namespace
}  // namespace onescale

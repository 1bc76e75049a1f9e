#include "parallel/file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "tests/temp_dir.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

TEST(File, HasItsNameWhenItIsWhole) {
  const TempDir dir;
  const std::string path = dir / "x";
  write_text(path, "old");
  write_text(dir / "x.partial", "another's");
  {
    File given_up = File::create(path);
    given_up.write("ne", 2);
    EXPECT_EQ(read_text(path), "old");
  }
  EXPECT_EQ(read_text(path), "old");
  File file = File::create(path), second = File::create(path);
  file.write("new", 3);
  file.write("ew!", 3);
  file.write("s", 1, 2);
  file.close();
  EXPECT_EQ(read_text(path), "nesew!");
  second.close();
  EXPECT_EQ(read_text(path), "");
  EXPECT_EQ(read_text(dir / "x.partial"), "another's");
  EXPECT_EQ(names(dir.path()), (std::set<std::string>{"x", "x.partial"}));
}

TEST(File, WhatIsNoPlainFileIsNotReplaced) {
  const TempDir dir;
  write_text(dir / "target", "old");
  fs::create_symlink("target", dir / "link");
  write_text(dir / "link", "new");
  EXPECT_TRUE(fs::is_symlink(dir / "link"));
  EXPECT_EQ(read_text(dir / "target"), "new");
  write_text("/dev/null", "text");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST(File, EveryFailureNamesTheFileAndAFix) {
  const TempDir dir;
  EXPECT_EQ(sentence([&] { read_text(dir / "none"); }), dir / "none: there is no such file; check the path");
  EXPECT_EQ(sentence([&] { read_text(dir.path()); }), dir.path() + ": is not a file; check the path");
  EXPECT_NE(sentence([&] { write_text(dir / "no/x", ""); }).find("no/x: cannot be opened"), std::string::npos);
  EXPECT_NE(sentence([&] { write_text(dir.path(), ""); }), "");
  write_text("/dev/null", "");
  EXPECT_NE(sentence([] { write_text("/dev/full", "x"); }).find("free some space"), std::string::npos);
}

TEST(NewDirectory, HasItsNameWhenItIsWhole) {
  const TempDir dir;
  write_text(dir / "out.partial", "another's");
  {
    const NewDirectory given_up(dir / "a/out");
    write_text(given_up.path() + "/file", "text");
  }
  EXPECT_EQ(names(dir / "a"), std::set<std::string>{});
  NewDirectory out(dir / "out/.");
  write_text(out.path() + "/file", "text");
  EXPECT_FALSE(fs::exists(dir / "out"));
  out.publish();
  EXPECT_EQ(read_text(dir / "out/file"), "text");
  NewDirectory late(dir / "late");
  fs::create_directory(dir / "late");
  write_text(dir / "late/file", "another's");
  EXPECT_NE(sentence([&] { late.publish(); }).find("give a free one"), std::string::npos);
  fs::create_directory(dir / "empty");
  fs::create_directory_symlink(dir / "empty", dir / "link");
  const std::set<std::string> before = names(dir.path());
  for (const char* taken : {"out", "link", "out.partial"})
    EXPECT_NE(sentence([&] { NewDirectory(dir / taken); }).find("give a free one"), std::string::npos) << taken;
  EXPECT_EQ(names(dir.path()), before);
  NewDirectory over(dir / "empty");
  over.publish();
  EXPECT_EQ(read_text(dir / "out.partial"), "another's");
}

TEST(PlainPath, WaysToWriteADirectory) {
  for (const char* path : {"a/b", "a/b/", "./a/b", "a//b/.", "a/c/../b/"}) EXPECT_EQ(plain_path(path), "a/b") << path;
  EXPECT_EQ(plain_path("/"), "/");
  EXPECT_EQ(plain_path(""), "");
}

}  // namespace
}  // namespace onescale

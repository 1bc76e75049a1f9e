#include "parallel/file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
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

// A process is killed while it writes a file and a directory, another lives, and a third had the number of this one.
TEST(Abandoned, IsRemovedByTheNextThatWritesThere) {
  const TempDir dir;
  const auto start = [&](bool ends) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      File file = File::create(dir / "file");
      const NewDirectory out(dir / "out");
      write_text(out.path() + "/part", "text");
      file.write("text", 4);
      if (write(ready[1], "x", 1) == 1) pause();
      _exit(1);
    }
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]), close(ready[1]);
    if (ends) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    return child;
  };
  const pid_t killed = start(true);
  const auto name = [](const char* target, pid_t owner) { return str(target, ".partial-", owner, "-0"); };
  EXPECT_EQ(names(dir.path()), (std::set<std::string>{name("file", killed), name("out", killed)}));
  const pid_t alive = start(false);
  std::set<std::string> others = {name("file", alive), name("out", alive), "file.partial-",
                                  "file.partial-1-0x", "file.partial-x-0", "my.file.partial-1-0"};
  EXPECT_EQ(names(dir.path()), (std::set<std::string>{name("file", alive), name("out", alive)}));
  for (const char* mine : {"file.partial-", "file.partial-1-0x", "file.partial-x-0", "my.file.partial-1-0"})
    std::ofstream(dir / mine) << "the user's";
  std::ofstream(dir / name("file", getpid())) << "of a container's process before";
  write_text(dir / "file", "whole");
  NewDirectory out(dir / "out");
  out.publish();
  others.insert({"file", "out"});
  EXPECT_EQ(names(dir.path()), others);
  // What this process itself is writing is not abandoned.
  File first = File::create(dir / "file"), second = File::create(dir / "file");
  second.close();
  first.close();
  kill(alive, SIGKILL);
  waitpid(alive, nullptr, 0);
}

TEST(PlainPath, WaysToWriteADirectory) {
  for (const char* path : {"a/b", "a/b/", "./a/b", "a//b/.", "a/c/../b/"}) EXPECT_EQ(plain_path(path), "a/b") << path;
  EXPECT_EQ(plain_path("/"), "/");
  EXPECT_EQ(plain_path(""), "");
}

}  // namespace
}  // namespace onescale

// Files and directories whose every failure is a sentence with the path, what was tried, the system's reason and a fix.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/error.h"

namespace onescale {

// A file that is missing or whose contents are wrong: certain to be of no use.
struct DamagedFile : Error {
  using Error::Error;
};

// A file that the system does not read or write now: it may be whole.
struct UnreadableFile : Error {
  using Error::Error;
};

template <class... Args>
void check_contents(bool ok, const Args&... sentence) {
  if (!ok) throw DamagedFile(brief(sentence...));
}

class File {
 public:
  static File open(const std::string& path);  // for reading; DamagedFile when there is none
  // For writing, under a name that was free beside `path`, PATH.partial-PID-N. It takes its own at close(), in place of
  // an older file, and is removed when that does not come, or by remove_abandoned() before the next. What is there and
  // no plain file (/dev/null, a link) is written to directly.
  static File create(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  std::int64_t size() const;
  void read(void* out, std::int64_t bytes, std::int64_t offset) const;         // DamagedFile where the file ends early
  void write(const void* data, std::int64_t bytes, std::int64_t offset = -1);  // there, or at the end
  void close();                                                                // after waiting until it is on the disk

 private:
  File(const std::string& path, const std::string& written, int flags);
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_, written_;  // the name, and the one that it has until close()
  int descriptor_;
};

// A directory that is filled beside its place, as a file is: path() is its name until publish().
class NewDirectory {
 public:
  // Makes it, and those above it. Throws Error where it cannot be written, or the target is there and no empty
  // directory that another can replace.
  explicit NewDirectory(const std::string& target);
  ~NewDirectory();  // removes what was not published
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  const std::string& path() const { return path_; }
  void publish();  // gives it its name, on the disk when this returns; throws where something else has that name

 private:
  std::string target_, path_;
  int lock_ = -1;
};

// Removes what processes that were killed have left beside `path`; what belongs to a live one stays.
void remove_abandoned(const std::string& path);

inline constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";  // that some editors put before UTF-8

std::string read_text(const std::string& path);
void write_text(const std::string& path, std::string_view text);  // and waits until it is on the disk
void sync_directory(const std::string& path);                     // the names in it are on the disk
// The path without "." and a "/" at its end.
std::string plain_path(const std::string& path);

}  // namespace onescale

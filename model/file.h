// A file whose every failure is a sentence with its path, what was tried and the system's reason.
#pragma once

#include <cstdint>
#include <string>

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
  if (!ok) throw DamagedFile(str(sentence...));
}

class File {
 public:
  static File open(const std::string& path);    // for reading; DamagedFile when there is none
  static File create(const std::string& path);  // for writing, emptied
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  std::int64_t size() const;
  void read(void* out, std::int64_t bytes, std::int64_t offset) const;  // DamagedFile where the file ends early
  void write(const void* data, std::int64_t bytes);                     // at the end
  void close();                                                         // after waiting until it is on the disk

 private:
  File(const std::string& path, int flags);
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_;
  int descriptor_;
};

std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);  // and waits until it is on the disk
void sync_directory(const std::string& path);                       // the names in it are on the disk

}  // namespace onescale

// A directory of a test's own, removed at its end, what a directory holds, and the sentence of an error.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>

#include "kernels/error.h"

namespace onescale {

class TempDir {
 public:
  TempDir() : path_((std::filesystem::temp_directory_path() / "onescale_test_XXXXXX").string()) {
    check(mkdtemp(path_.data()) != nullptr, path_, " cannot be created");
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// What lies in a directory; nothing where there is none.
inline std::set<std::string> names(const std::string& directory) {
  std::set<std::string> all;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(directory, none)) all.insert(entry.path().filename());
  return all;
}

// What the exception thrown by `f` says; empty when it throws none.
template <class Exception = Error, class F>
std::string sentence(const F& f) {
  try {
    f();
  } catch (const Exception& e) {
    return e.what();
  }
  return "";
}

}  // namespace onescale

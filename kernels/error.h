// Every error of the program is one sentence: what, which value, where, how to fix it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace onescale {

// A failure while running: exit code 1.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A wrong command line, configuration or combination of settings: exit code 2.
struct UsageError : Error {
  using Error::Error;
};

// The arguments written one after the other, as operator<< writes them.
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

template <class... Args>
void check(bool ok, const Args&... sentence) {
  if (!ok) throw Error(str(sentence...));
}

template <class... Args>
void check_usage(bool ok, const Args&... sentence) {
  if (!ok) throw UsageError(str(sentence...));
}

}  // namespace onescale

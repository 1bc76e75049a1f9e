// What was compared and what differed.
#pragma once

#include <cstdio>
#include <string>

#include "kernels/error.h"

namespace onescale::parity {

class Report {
 public:
  explicit Report(bool stop) : stop_(stop) {}
  void begin(const std::string& what) {
    what_ = what;
    ++cases;
  }
  // Throws at the first difference when asked to stop there.
  template <class... Args>
  void expect(bool ok, const Args&... sentence) {
    ++comparisons;
    if (ok) return;
    ++failures;
    const std::string text = str(what_, ": ", sentence...);
    check(!stop_, text);
    if (failures < 20) std::printf("DIFFERS %s\n", text.c_str()), std::fflush(stdout);
  }

  std::int64_t cases = 0, comparisons = 0, failures = 0;

 private:
  bool stop_;
  std::string what_;
};

}  // namespace onescale::parity

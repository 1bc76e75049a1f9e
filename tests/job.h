// Programs as a shell starts them, and how they end.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace onescale {

// Jobs of failing ranks must end within this.
inline constexpr double soon = 10;  // seconds

struct Ended {
  int code = 0;
  double seconds = 0;
  std::string error;  // standard error, or all that it printed
  std::string first_line() const { return error.substr(0, error.find('\n')); }
  int sentences() const {
    int count = 0;
    for (std::size_t i = error.find("onescale:"); i != std::string::npos; i = error.find("onescale:", i + 1)) ++count;
    return count;
  }
};

inline Ended run_job(const std::string& command, bool all = false) {
  const auto begin = std::chrono::steady_clock::now();
  Ended ended;
  FILE* pipe =
      popen(("export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0; " + command + (all ? " 2>&1" : " 2>&1 >/dev/null"))
                .c_str(),
            "r");  // NOLINT(cert-env33-c)
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) ended.error.append(buffer, n);
  const int status = pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  ended.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return ended;
}

}  // namespace onescale

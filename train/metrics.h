// What a run tells: metrics.jsonl for programs, log.txt and the progress line for people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "parallel/json.h"

namespace onescale {

// DIR/metrics.jsonl, one object a line, written through at once; every object has an integer "step". Opening for a
// resume at `next_step` drops every line of that step or a later one and a last line cut off by a kill (the file is
// replaced whole), so that it reads as if the run had never stopped. Throws Error where the file cannot be written or a
// complete line is not JSON.
class MetricsFile {
 public:
  MetricsFile(const std::string& dir, std::int64_t next_step);
  void write(const Json& object);

 private:
  std::string path_;
  std::ofstream file_;
};

// Whether DIR/metrics.jsonl holds this event of this step, with a finite loss if it has one.
bool has_event(const std::string& dir, std::int64_t step, const std::string& event);

struct Progress {
  std::int64_t step = 0, steps = 0;  // step: done so far
  double loss = 0, grad_norm = 0, lr = 0, tokens_per_s = 0, mfu = 0;
  double seconds_left = 0;
};

// "step 120/2000  loss 3.2145  norm 0.84  lr 3.0e-04  12.3k tok/s  mfu 41.2%  1m 05s left"; mfu is left out when 0.
std::string progress_text(const Progress& progress);
std::string duration_text(double seconds);  // "42s", "1m 05s", "2h 03m"

// Throws Error where what was printed on standard output did not arrive.
void check_output();

// Lines of standard output and of DIR/log.txt (which gets a time before each; that it cannot be written is said on
// standard output, once, and ends nothing). On a terminal the progress line is rewritten in place; elsewhere one that
// is due is printed as a line.
class Log {
 public:
  // dir "": standard output alone. terminal: usually isatty(1).
  Log(const std::string& dir, bool terminal, std::FILE* out = stdout);
  ~Log();
  Log(const Log&) = delete;  // ends its line once
  Log& operator=(const Log&) = delete;
  void line(const std::string& text);
  void progress(const std::string& text, bool due);

 private:
  void record(const std::string& text);
  std::string path_;
  std::ofstream file_;
  std::FILE* out_;
  bool terminal_, shown_ = false, failed_ = false;
};

}  // namespace onescale

#include "train/metrics.h"

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <iomanip>
#include <utility>

#include "kernels/error.h"
#include "parallel/file.h"

namespace onescale {
namespace {

std::ofstream append_to(const std::string& path) {
  std::ofstream file(path, std::ios::binary | std::ios::app);
  check(file.is_open(), path, ": cannot be written (", std::strerror(errno),
        "): free the place or choose another run_dir");
  return file;
}

void put(std::ofstream& file, const std::string& text, const std::string& path) {
  file << text << std::flush;
  check(file.good(), path, ": cannot be written (", std::strerror(errno),
        "): free some space, then run the same command again");
}

template <class... Args>
std::string format(const char* pattern, Args... args) {
  std::array<char, 96> buffer;
  std::snprintf(buffer.data(), buffer.size(), pattern, args...);
  return buffer.data();
}

}  // namespace

MetricsFile::MetricsFile(const std::string& dir, std::int64_t next_step) : path_(dir + "/metrics.jsonl") {
  std::ifstream in(path_, std::ios::binary);
  std::string kept;
  bool dropped = false;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    const std::string where = str(path_, ":", ++number);
    bool keep = !in.eof();  // getline met the end of the file before a newline otherwise
    try {
      keep = keep && Json::parse(line, where).at("step").integer() < next_step;
    } catch (const Error& e) {
      throw Error(str(e.what(), "; remove this line to go on"));
    }
    if (keep) kept += line + "\n";
    dropped |= !keep;
  }
  if (dropped) write_text(path_, kept);
  file_ = append_to(path_);
}

void MetricsFile::write(const Json& object) {
  put(file_, object.dump() + "\n", path_);
}

bool has_event(const std::string& dir, std::int64_t step, const std::string& event) {
  std::ifstream in(dir + "/metrics.jsonl", std::ios::binary);
  for (std::string line; std::getline(in, line) && !in.eof();) {
    if (line.find("\"event\"") == std::string::npos) continue;  // most lines are of steps
    const Json json = Json::parse(line, dir + "/metrics.jsonl");
    if (json.at("step").integer() == step && json.at("event").string() == event)
      return !json.has("loss") || !json.at("loss").is_null();
  }
  return false;
}

std::string duration_text(double seconds) {
  const auto s = static_cast<long>(std::lround(std::fmax(0, std::fmin(seconds, 1e9))));
  if (s < 60) return format("%lds", s);
  return s < 3600 ? format("%ldm %02lds", s / 60, s % 60) : format("%ldh %02ldm", s / 3600, s / 60 % 60);
}

std::string progress_text(const Progress& p) {
  const std::string rate = p.tokens_per_s < 1e3   ? format("%.0f", p.tokens_per_s)
                           : p.tokens_per_s < 1e6 ? format("%.1fk", p.tokens_per_s / 1e3)
                                                  : format("%.2fM", p.tokens_per_s / 1e6);
  return str("step ", p.step, "/", p.steps, format("  loss %.4f  norm %.3f  lr %.2e  ", p.loss, p.grad_norm, p.lr),
             rate, " tok/s", p.mfu > 0 ? format("  mfu %.1f%%", 100 * p.mfu) : "", "  ", duration_text(p.seconds_left),
             " left");
}

void check_output() {
  check(std::fflush(stdout) == 0 && std::ferror(stdout) == 0,
        "standard output cannot be written; its reader is gone or the disk full");
}

Log::Log(const std::string& dir, bool terminal, std::FILE* out)
    : path_(dir + "/log.txt"),
      file_(dir.empty() ? std::ofstream() : append_to(path_)),
      out_(out),
      terminal_(terminal) {}

Log::~Log() {
  if (shown_) std::fputs("\n", out_);
}

void Log::line(const std::string& text) {
  if (shown_) std::fputs("\r\x1b[K", out_);  // erase the progress line; the next step shows it again
  shown_ = false;
  std::fputs((text + "\n").c_str(), out_);
  std::fflush(out_);
  record(text);
}

void Log::progress(const std::string& text, bool due) {
  if (!terminal_) {
    if (due) line(text);
    return;
  }
  std::fputs(("\r" + text + "\x1b[K").c_str(), out_);
  std::fflush(out_);
  shown_ = true;
  if (due) record(text);
}

void Log::record(const std::string& text) {
  if (!file_.is_open()) return;
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  file_.clear();
  file_ << std::put_time(localtime_r(&now, &local), "%F %T  ") << text << std::endl;
  if (file_.good() || std::exchange(failed_, true)) return;
  std::fputs(str(path_, ": cannot be written (", std::strerror(errno), "); its lines are here alone\n").c_str(), out_);
}

}  // namespace onescale

#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>

#include "kernels/error.h"

namespace onescale {
namespace {

std::FILE* open_file(const std::string& path, const char* mode) {
  std::FILE* file = std::fopen(path.c_str(), mode);
  check(file, path, ": cannot be written (", std::strerror(errno), "): free the place or choose another run_dir");
  return file;
}

void put(std::FILE* file, const std::string& text, const std::string& path) {
  const bool ok = std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0;
  check(ok, path, ": cannot be written (", std::strerror(errno), "): free some space, then run the same command again");
}

template <class... Args>
std::string format(const char* pattern, Args... args) {
  std::array<char, 96> buffer;
  std::snprintf(buffer.data(), buffer.size(), pattern, args...);
  return buffer.data();
}

// Replaces `path` whole, so that a kill leaves the old text or the new one.
void replace_file(const std::string& path, const std::string& text) {
  const std::string aside = path + ".tmp";
  std::FILE* file = open_file(aside, "wb");
  put(file, text, aside);
  const bool ok = fsync(fileno(file)) == 0 && std::fclose(file) == 0 && std::rename(aside.c_str(), path.c_str()) == 0;
  check(ok, path, ": cannot be replaced (", std::strerror(errno),
        "): free some space, then run the same command again");
}

}  // namespace

MetricsFile::MetricsFile(const std::string& dir, std::int64_t next_step) : path_(dir + "/metrics.jsonl") {
  std::ifstream in(path_, std::ios::binary);
  std::string kept;
  bool dropped = false;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    const std::string where = str(path_, ":", ++number);
    const bool whole = !in.eof();  // getline met the end of the file before a newline otherwise
    if (whole && Json::parse(line, where).at("step").integer() < next_step) {
      kept += line + "\n";
    } else {
      dropped = true;
    }
  }
  if (dropped) replace_file(path_, kept);
  file_ = open_file(path_, "ab");
}

MetricsFile::~MetricsFile() {
  std::fclose(file_);
}

void MetricsFile::write(const Json& object) {
  put(file_, object.dump() + "\n", path_);
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

Log::Log(const std::string& dir, bool terminal, std::int64_t log_every, std::FILE* out)
    : path_(dir + "/log.txt"),
      file_(dir.empty() ? nullptr : open_file(path_, "ab")),
      out_(out),
      terminal_(terminal),
      log_every_(log_every) {}

Log::~Log() {
  if (shown_) std::fputs("\n", out_);
  if (file_) std::fclose(file_);
}

void Log::line(const std::string& text) {
  if (shown_) std::fputs("\r\x1b[K", out_);  // erase the progress line; the next step shows it again
  shown_ = false;
  std::fputs((text + "\n").c_str(), out_);
  std::fflush(out_);
  record(text);
}

void Log::progress(const Progress& progress) {
  const std::string text = progress_text(progress);
  const bool due = progress.step % log_every_ == 0 || progress.step == progress.steps;
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
  if (!file_) return;
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 32> stamp;
  std::strftime(stamp.data(), stamp.size(), "%Y-%m-%d %H:%M:%S  ", &local);
  put(file_, stamp.data() + text + "\n", path_);
}

}  // namespace onescale

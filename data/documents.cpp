#include "data/documents.h"

#include <fnmatch.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iomanip>

#include "kernels/error.h"
#include "parallel/file.h"
#include "parallel/json.h"

namespace onescale {
namespace fs = std::filesystem;
namespace {

bool is_json_lines(const std::string& path) {
  return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

bool matches(const std::vector<std::string>& patterns, const std::string& path_below, const std::string& name) {
  return patterns.empty() || std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
           const std::string& subject = pattern.find('/') == std::string::npos ? name : path_below;
           return fnmatch(pattern.c_str(), subject.c_str(), 0) == 0;
         });
}

// Paths of the files below a directory, sorted. Links to files count, links to directories do not, so no walk is
// endless.
std::vector<std::string> walk(const std::string& dir, const std::vector<std::string>& patterns) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator entry(dir, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (name.starts_with(".")) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file(ignored) &&
               matches(patterns, entry->path().lexically_relative(dir).string(), name)) {
      paths.push_back(entry->path().string());
    }
  }
  check(!error, dir, ": the directory cannot be read (", error.message(), "): check its rights.");
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

Documents::Documents(const std::vector<std::string>& inputs, const std::vector<std::string>& patterns) {
  check_usage(!inputs.empty(), "No input was given: name files or directories.");
  for (const std::string& input : inputs) {
    std::error_code error;
    const fs::file_status status = fs::status(input, error);
    check_usage(fs::exists(status), input, ": the input does not exist: check the path.");
    for (const std::string& path : fs::is_directory(status) ? walk(input, patterns) : std::vector<std::string>{input}) {
      const std::uintmax_t bytes = fs::file_size(path, error);
      check(!error, path, ": the file cannot be read (", error.message(), "): check its rights.");
      files_.push_back(path);
      bytes_ += static_cast<std::int64_t>(bytes);
    }
  }
  std::string wanted;
  for (const std::string& pattern : patterns) wanted += (wanted.empty() ? "" : " ") + pattern;
  check_usage(bytes_ > 0, "The inputs (first ", inputs[0], ") hold ", files_.size(), " files",
              patterns.empty() ? "" : " that match ", wanted, " and no bytes: there is nothing to prepare.");
}

void Documents::each(const std::function<void(Document&&)>& take) {
  std::int64_t number = 0;
  const auto give = [&](Document&& document) {
    document.number = number;
    if (!document.text.empty()) ++number, take(std::move(document));
  };
  bytes_read_ = 0;
  for (const std::string& path : files_) {
    if (!is_json_lines(path)) {
      Document document{read_text(path), 0, path};
      bytes_read_ += std::ssize(document.text);
      give(std::move(document));
      continue;
    }
    std::ifstream lines(path, std::ios::binary);
    std::string line;
    for (std::int64_t at = 1; std::getline(lines, line); ++at) {
      bytes_read_ += std::ssize(line) + 1;
      if (at == 1 && line.starts_with(byte_order_mark)) line.erase(0, byte_order_mark.size());
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      Document document{"", 0, str(path, " line ", at)};
      const Json json = Json::parse(line, document.source);
      check(json.is_object() && (json.has("text") || (json.has("prompt") && json.has("completion"))), document.source,
            ": expected an object with \"text\", or with \"prompt\" and \"completion\": correct the line.");
      document.text = json.at(json.has("text") ? "text" : "prompt").string();
      document.prompt_bytes = json.has("text") ? 0 : document.text.size();
      if (!json.has("text")) document.text += json.at("completion").string();
      give(std::move(document));
    }
    check(lines.eof(), path, ": the file cannot be read: check its rights.");
  }
  check_usage(number > 0, "The inputs (first ", files_[0], ") hold ", files(),
              " files without a text that is not empty: there is nothing to prepare.");
}

std::string Documents::fingerprint() const {
  std::uint64_t hash = 0;
  std::vector<char> piece(1 << 20);
  for (const std::string& path : files_) {
    const std::array<std::uintmax_t, 2> shape = {is_json_lines(path), fs::file_size(path)};
    hash = XXH3_64bits_withSeed(shape.data(), sizeof shape, hash);
    std::ifstream file(path, std::ios::binary);
    while (file.read(piece.data(), std::ssize(piece)) || file.gcount() > 0)
      hash = XXH3_64bits_withSeed(piece.data(), static_cast<std::size_t>(file.gcount()), hash);
    check(file.eof(), path, ": the file cannot be read; check its rights.");
  }
  return str(std::hex, std::setfill('0'), std::setw(16), hash);
}

}  // namespace onescale

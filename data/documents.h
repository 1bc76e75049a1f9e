// Documents, one after the other, from files, directories and JSON lines. Bytes are taken as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace onescale {

struct Document {
  std::string text;
  std::size_t prompt_bytes = 0;  // the beginning of text that is ignored in the loss
  std::string source;            // "dir/a.py" or "b.jsonl line 7"
  std::int64_t number = 0;       // of all documents, from 0
};

// A file is one document; a file whose name ends in .jsonl or .ndjson holds one JSON object a line, with `text`, or
// with `prompt` and `completion`. Directories are walked recursively in the order of the bytes of their paths; links to
// directories and names that begin with a dot are not followed. Empty documents are left out, and so is a byte order
// mark before JSON lines.
class Documents {
 public:
  // patterns (such as "*.py") choose files inside directories by name, or by the path below the input if they hold a
  // slash; none: all files. A file named as an input is always taken. Throws UsageError when an input does not exist or
  // nothing is left.
  Documents(const std::vector<std::string>& inputs, const std::vector<std::string>& patterns);

  // All documents, one after the other. Throws Error naming file (and line) for what cannot be read, UsageError when
  // all are empty.
  void each(const std::function<void(Document&&)>& take);

  std::int64_t files() const { return static_cast<std::int64_t>(files_.size()); }
  std::int64_t bytes() const { return bytes_; }            // of all files
  std::int64_t bytes_read() const { return bytes_read_; }  // by each()
  // XXH3 of all contents in their order, in hexadecimal: whether the same inputs were prepared before, wherever they
  // lie. Reads everything.
  std::string fingerprint() const;

 private:
  std::vector<std::string> files_;
  std::int64_t bytes_ = 0, bytes_read_ = 0;
};

}  // namespace onescale

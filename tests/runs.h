// What the tests of whole runs share: a corpus, and what a run wrote.
#pragma once

#include <filesystem>
#include <fstream>

#include "data/prepare.h"
#include "parallel/json.h"
#include "tests/temp_dir.h"

namespace onescale {

// Some hundred short documents in dir/text, prepared in dir/data.
inline void prepare_documents(const TempDir& dir) {
  std::filesystem::create_directories(dir / "text");
  for (int i = 0; i < 300; ++i) {
    std::ofstream(dir / str("text/", i, ".py"))
        << "def function_" << i << "(x, y):\n    return x * " << i * 7 % 13 << " + y[" << i % 5 << "]\n\nclass C" << i
        << ":\n    value = " << i * i << "\n";
  }
  PrepareOptions options;
  options.inputs = {dir / "text"};
  options.patterns = {"*.py"};
  options.out = dir / "data";
  options.vocab_size = 300;
  options.validation_share = 0.1;
  options.threads = 1;
  prepare(options);
}

inline std::vector<Json> read_metrics(const std::string& run_dir) {
  std::vector<Json> lines;
  std::ifstream file(run_dir + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line, run_dir));
  return lines;
}

// A line of them without what a clock tells.
inline std::string timeless(const Json& line) {
  Json kept = Json::object();
  for (const auto& [key, value] : line.items()) {
    if (key != "seconds" && key != "tokens_per_s" && key != "mfu" && key != "exposed_wait") kept.set(key, value);
  }
  return kept.dump();
}

}  // namespace onescale

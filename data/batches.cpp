#include "data/batches.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <optional>

#include "data/order.h"
#include "kernels/error.h"
#include "parallel/json.h"

namespace onescale {
namespace {

std::vector<std::string> shard_files(const std::string& dir, const std::string& split) {
  std::vector<std::string> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(split + "_") && name.ends_with(".bin")) files.push_back(entry->path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// What `prepare` has written about a split; nothing where the files come from elsewhere.
std::optional<Json> prepared(const std::string& dir, const std::string& split) {
  const std::string file = dir + "/prepare.json";
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return std::nullopt;
  return Json::read_file(file).at(split);
}

}  // namespace

bool Dataset::exists(const std::string& dir, const std::string& split) {
  const std::optional<Json> made = prepared(dir, split);
  return made ? made->at("shards").integer() > 0 : !shard_files(dir, split).empty();
}

Dataset::Dataset(const std::string& dir, const std::string& split, const Vocabulary& expected)
    : name_(dir + "/" + split + "_*.bin") {
  const std::vector<std::string> files = shard_files(dir, split);
  const std::optional<Json> made = prepared(dir, split);
  for (std::int64_t i = 0; made && i < made->at("shards").integer(); ++i) {
    const std::string file = str(dir, "/", split, "_", std::setfill('0'), std::setw(6), i, ".bin");
    check(std::filesystem::exists(file), file, ": the file is missing, but prepare.json names it: copy the directory ",
          "whole, or prepare the data again.");
  }
  check(!made || !files.empty(), dir, ": prepare held nothing out for ", split,
        ": take the other split, or prepare with another val_share.");
  check(!files.empty(), name_, ": there are no token files here; make them with `onescale prepare`.");
  // Every shard stays open: more than a process may have at first, of those that it may have at all.
  rlimit open_files{};
  getrlimit(RLIMIT_NOFILE, &open_files);
  open_files.rlim_cur = open_files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &open_files);
  std::int64_t tokens = 0;
  for (const std::string& file : files) {
    const Shard& shard = shards_.emplace_back(file, expected);
    check(shard.vocabulary().hash == shards_[0].vocabulary().hash, file,
          ": the tokens were made with another tokenizer than those of ", files[0], ": prepare them together.");
    ends_.push_back(tokens += shard.tokens());
  }
  check(!made || tokens == made->at("tokens").integer(), describe(), ", but prepare.json says ",
        made ? made->at("tokens").integer() : 0, " in ", made ? made->at("shards").integer() : 0,
        ": copy the directory whole and nothing into it, or prepare the data again.");
}

std::string Dataset::describe() const {
  return str(name_, ": ", tokens(), " tokens in ", shards_.size(), shards_.size() == 1 ? " shard" : " shards");
}

std::uint64_t Dataset::hash() const {
  std::uint64_t hash = 0;
  for (const Shard& shard : shards_) hash = shard.hash(hash);
  return hash;
}

void Dataset::read(std::int64_t first, std::int64_t count, std::int32_t* ids, std::uint8_t* no_target) const {
  auto number = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  while (count > 0) {
    const Shard& shard = shards_.at(number);
    const std::int64_t begin = first - (ends_[number++] - shard.tokens()), n = std::min(count, shard.tokens() - begin);
    shard.read(begin, n, ids, no_target);
    ids += n, no_target += n, first += n, count -= n;
  }
}

Batches::Batches(const Dataset& dataset, std::int64_t seq_len, std::uint64_t seed, SampleOrder order)
    : dataset_(dataset), seq_len_(seq_len), seed_(seed), order_(order) {
  check_usage(seq_len > 0, "seq_len is ", seq_len, " but must be positive.");
  const bool whole = order == SampleOrder::shuffled;
  const std::int64_t needed = whole ? seq_len + 1 : 2;
  check(tokens() >= needed, dataset.describe(), ", but ", whole ? str("one row of seq_len ", seq_len) : "evaluation",
        " needs ", needed, ": prepare more text", whole ? " or lower seq_len." : ".");
  windows_ = (tokens() - 1 + (whole ? 0 : seq_len - 1)) / seq_len;
}

void Batches::require_rows(std::int64_t global_batch) const {
  check(windows_ >= global_batch, dataset_.describe(), ", which are ", windows_, " rows of seq_len ", seq_len_,
        ", but a step takes ", global_batch, ": prepare more text, or lower global_batch or seq_len.");
}

Batch Batches::read(std::int64_t first_sample, std::int64_t count) const {
  Batch batch{count, seq_len_, {}, {}, 0};
  const auto size = static_cast<std::size_t>(count * seq_len_);
  batch.ids.resize(size);
  batch.labels.assign(size, ignored_label);
  std::vector<std::int32_t> window(static_cast<std::size_t>(seq_len_) + 1);
  std::vector<std::uint8_t> no_target(window.size());
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int64_t epoch = (first_sample + row) / windows_, index = (first_sample + row) % windows_;
    const std::int64_t number = order_ == SampleOrder::shuffled ? permute(index, windows_, seed_, epoch) : index;
    const std::int64_t begin = number * seq_len_, n = std::min(seq_len_ + 1, tokens() - begin);
    dataset_.read(begin, n, window.data(), no_target.data());
    std::copy_n(window.data(), std::min(n, seq_len_), batch.ids.data() + row * seq_len_);
    for (std::int64_t t = 0; t + 1 < n; ++t) {
      const auto target = static_cast<std::size_t>(t + 1);
      if (no_target[target] != 0) continue;
      batch.labels[static_cast<std::size_t>(row * seq_len_ + t)] = window[target];
      ++batch.good_tokens;
    }
  }
  return batch;
}

Batch Batches::rows(std::int64_t first_sample, std::int64_t count) {
  if (next_.valid() && next_first_ == first_sample && next_count_ == count) return next_.get();
  return read(first_sample, count);
}

void Batches::prefetch(std::int64_t first_sample, std::int64_t count) {
  next_first_ = first_sample;
  next_count_ = count;
  next_ = std::async(std::launch::async, [this, first_sample, count] { return read(first_sample, count); });
}

}  // namespace onescale

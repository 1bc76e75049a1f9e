// Rows of tokens for training and evaluation. The position in the data is one integer, the global sample number: row r
// of step s with a global batch of G rows is sample s * G + r, whoever reads it.
#pragma once

#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "data/shard.h"

namespace onescale {

// All shards of one split as one sequence of tokens.
class Dataset {
 public:
  // Opens DIR/<split>_*.bin in the order of their names; split is "train" or "val". Throws Error when there is none,
  // when they are not all that DIR/prepare.json names, or as Shard does.
  Dataset(const std::string& dir, const std::string& split, const Vocabulary& expected);
  // Whether the split has a shard, or had one when it was prepared.
  static bool exists(const std::string& dir, const std::string& split);

  std::int64_t tokens() const { return ends_.back(); }
  std::string describe() const;  // "data/train_*.bin: 1234 tokens in 3 shards"
  // Of all shards: whether the data are those that a run was begun with. See Shard::hash().
  std::uint64_t hash() const;

  // As Shard::read(), across shards.
  void read(std::int64_t first, std::int64_t count, std::int32_t* ids, std::uint8_t* no_target) const;

 private:
  std::vector<Shard> shards_;
  std::vector<std::int64_t> ends_;  // of each shard, in tokens from the start of the first
  std::string name_;
};

// A label that is no target.
inline constexpr std::int32_t ignored_label = -100;

struct Batch {
  std::int64_t rows = 0, seq_len = 0;
  std::vector<std::int32_t> ids, labels;  // [rows, seq_len]; labels[t] is the token after ids[t], or ignored_label
  std::int64_t good_tokens = 0;           // labels that are not ignored
};

enum class SampleOrder : std::uint8_t {
  shuffled,    // windows in the permuted order of each epoch; the last, partial window of the data is never read
  sequential,  // windows in file order; the last one is filled up with ignored labels, so each token but the first is a
               // target once an epoch
};

// Cuts a dataset into windows of seq_len + 1 tokens, each beginning seq_len after the one before, across shards and
// documents.
class Batches {
 public:
  // The dataset must outlive it. Throws Error, with both numbers, when the data hold less than one window.
  Batches(const Dataset& dataset, std::int64_t seq_len, std::uint64_t seed, SampleOrder order);
  Batches(const Batches&) = delete;  // the thread refers to it
  Batches& operator=(const Batches&) = delete;

  std::int64_t windows() const { return windows_; }  // of one epoch
  std::int64_t tokens() const { return dataset_.tokens(); }
  // Throws Error when an epoch holds fewer rows than a step, naming both.
  void require_rows(std::int64_t global_batch) const;

  // Samples [first_sample, first_sample + count), whole epochs after each other. A pure function of its arguments.
  Batch rows(std::int64_t first_sample, std::int64_t count);
  // Begins to prepare these rows on another thread. A pure cache: rows() returns the same with and without it, and
  // throws what the thread threw. At most one is under way; another call replaces a result that was not fetched.
  void prefetch(std::int64_t first_sample, std::int64_t count);

 private:
  Batch read(std::int64_t first_sample, std::int64_t count) const;

  const Dataset& dataset_;
  std::int64_t seq_len_, windows_;
  std::uint64_t seed_;
  SampleOrder order_;
  std::future<Batch> next_;
  std::int64_t next_first_ = -1, next_count_ = 0;
};

}  // namespace onescale

#include "data/batches.h"

#include <algorithm>
#include <map>
#include <set>

#include "tests/data/helpers.h"

namespace onescale {
namespace {

constexpr std::int64_t vocab = 997;

// Token number i of the data: 997 is prime, so the tokens of a window of a few hundred tell where it began.
std::int32_t token(std::int64_t i) {
  return static_cast<std::int32_t>(i % vocab);
}

Vocabulary vocabulary() {
  return {vocab, 0, {1, 2, 3, 4}};
}

// Shards of the given sizes, whose tokens count on across them; masked: numbers of tokens that are no target.
void write_shards(const TempDir& dir, const std::vector<std::int64_t>& sizes,
                  const std::set<std::int64_t>& masked = {}) {
  std::int64_t next = 0;
  for (std::size_t s = 0; s < sizes.size(); ++s) {
    ShardWriter writer(dir / ("train_00000" + std::to_string(s) + ".bin"), vocabulary());
    std::vector<std::int32_t> ids;
    std::vector<std::uint8_t> no_target;
    for (std::int64_t i = 0; i < sizes[s]; ++i, ++next)
      ids.push_back(token(next)), no_target.push_back(masked.contains(next));
    add_document(writer, ids, no_target);
    writer.finish();
  }
}

void expect_equal(const Batch& a, const Batch& b) {
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_EQ(a.labels, b.labels);
  EXPECT_EQ(a.good_tokens, b.good_tokens);
}

TEST(Batches, WindowsCoverAnEpochOnceAcrossShards) {
  TempDir dir;
  write_shards(dir, {5, 301, 0, 77, 117});  // 500 tokens
  const Dataset data(dir / "", "train", vocabulary());
  EXPECT_EQ(data.tokens(), 500);
  for (const std::int64_t seq_len : {1, 7, 10, 33, 499}) {
    Batches batches(data, seq_len, 3, SampleOrder::shuffled);
    ASSERT_EQ(batches.windows(), 499 / seq_len);
    const std::int64_t epochs = 3;
    const Batch batch = batches.rows(0, epochs * batches.windows());
    ASSERT_EQ(std::ssize(batch.ids), batch.rows * seq_len);
    EXPECT_EQ(batch.good_tokens, batch.rows * seq_len);
    std::vector<std::int32_t> first;
    for (std::int64_t row = 0; row < batch.rows; ++row) {
      const std::int32_t* ids = batch.ids.data() + row * seq_len;
      const std::int32_t* labels = batch.labels.data() + row * seq_len;
      ASSERT_EQ(ids[0] % seq_len, 0);  // stride seq_len, from token 0 on
      for (std::int64_t t = 0; t < seq_len; ++t) {
        ASSERT_EQ(ids[t], token(ids[0] + t));
        ASSERT_EQ(labels[t], token(ids[0] + t + 1));
      }
      first.push_back(ids[0]);
    }
    for (std::int64_t e = 0; e < epochs; ++e) {
      const auto begin = first.begin() + e * batches.windows();
      EXPECT_EQ(std::set<std::int32_t>(begin, begin + batches.windows()).size(),
                static_cast<std::size_t>(batches.windows()));
    }
    const auto second = first.begin() + batches.windows();
    EXPECT_EQ(std::equal(first.begin(), second, second), batches.windows() == 1);
  }
}

TEST(Batches, AnyCutIntoRowsIsTheSame) {
  TempDir dir;
  write_shards(dir, {100, 223});
  const Dataset data(dir / "", "train", vocabulary());
  Batches batches(data, 8, 1, SampleOrder::shuffled);
  const Batch whole = batches.rows(5, 90);  // more than two epochs of 40
  for (const std::int64_t rows : {1, 7, 45}) {
    Batches fresh(data, 8, 1, SampleOrder::shuffled);
    std::vector<std::int32_t> ids, labels;
    for (std::int64_t at = 5; at < 95; at += rows) {
      const Batch part = fresh.rows(at, std::min<std::int64_t>(rows, 95 - at));
      ids.insert(ids.end(), part.ids.begin(), part.ids.end());
      labels.insert(labels.end(), part.labels.begin(), part.labels.end());
    }
    EXPECT_EQ(ids, whole.ids);
    EXPECT_EQ(labels, whole.labels);
  }
  Batches other(data, 8, 2, SampleOrder::shuffled);
  EXPECT_NE(other.rows(5, 90).ids, whole.ids);
}

TEST(Batches, PrefetchChangesNothing) {
  TempDir dir;
  write_shards(dir, {400});
  const Dataset data(dir / "", "train", vocabulary());
  Batches with(data, 8, 1, SampleOrder::shuffled), without(data, 8, 1, SampleOrder::shuffled);
  for (std::int64_t step = 0; step < 40; ++step) {
    const Batch batch = with.rows(step * 4, 4);
    with.prefetch((step + (step % 5 == 4 ? 2 : 1)) * 4, 4);  // sometimes the wrong rows
    if (step % 7 == 0) with.prefetch((step + 1) * 4, 4);
    if (step % 3 == 0) expect_equal(with.rows(1, 2), without.rows(1, 2));
    expect_equal(batch, without.rows(step * 4, 4));
  }  // ends with rows that nobody fetches
}

TEST(Batches, SequentialReadsEachTokenOnce) {
  TempDir dir;
  write_shards(dir, {50, 53});
  const Dataset data(dir / "", "train", vocabulary());
  for (const std::int64_t seq_len : {1, 10, 17, 102, 103, 500}) {
    Batches batches(data, seq_len, 0, SampleOrder::sequential);
    const Batch batch = batches.rows(0, batches.windows());
    EXPECT_EQ(batch.good_tokens, 102);
    std::vector<std::int32_t> targets;
    for (const std::int32_t label : batch.labels) {
      if (label != ignored_label) targets.push_back(label);
    }
    ASSERT_EQ(targets.size(), 102U);
    for (std::int64_t i = 0; i < 102; ++i) ASSERT_EQ(targets[static_cast<std::size_t>(i)], token(i + 1));
    for (const std::int32_t id : batch.ids) ASSERT_TRUE(id >= 0 && id < vocab);
  }
}

TEST(Batches, MaskedTokensAreNoTargets) {
  TempDir dir;
  write_shards(dir, {30, 31}, {0, 4, 5, 29, 30, 31});
  const Dataset data(dir / "", "train", vocabulary());
  Batches batches(data, 10, 0, SampleOrder::sequential);
  const Batch batch = batches.rows(0, 6);
  EXPECT_EQ(batch.good_tokens, 60 - 5);  // token 0 is no target anyway
  for (std::int64_t i = 0; i < 60; ++i) {
    const bool masked = i + 1 == 4 || i + 1 == 5 || (i + 1 >= 29 && i + 1 <= 31);
    EXPECT_EQ(batch.labels[static_cast<std::size_t>(i)], masked ? ignored_label : token(i + 1));
    EXPECT_EQ(batch.ids[static_cast<std::size_t>(i)], token(i));  // still read as input
  }
}

TEST(Batches, TooLittleDataIsOneSentence) {
  TempDir dir;
  expect_contains(sentence([&] { Dataset(dir / "", "train", vocabulary()); }),
                  {"train_*.bin", "no token files", "prepare"});
  EXPECT_FALSE(Dataset::exists(dir / "", "train"));
  write_shards(dir, {20, 13});
  EXPECT_TRUE(Dataset::exists(dir / "", "train"));
  EXPECT_FALSE(Dataset::exists(dir / "", "val"));
  const Dataset data(dir / "", "train", vocabulary());
  expect_contains(sentence([&] { Batches(data, 33, 0, SampleOrder::shuffled); }),
                  {"33 tokens", "seq_len 33", "needs 34"});
  Batches batches(data, 8, 0, SampleOrder::shuffled);
  batches.require_rows(4);
  expect_contains(sentence([&] { batches.require_rows(5); }),
                  {"33 tokens", "4 rows of seq_len 8", "a step takes 5", "global_batch"});
  expect_contains(sentence<UsageError>([&] { Batches(data, 0, 0, SampleOrder::shuffled); }), {"seq_len is 0"});
  Vocabulary other = vocabulary();
  other.hash[0] = 9;
  expect_contains(sentence([&] { Dataset(dir / "", "train", other); }), {"train_000000.bin", "another tokenizer"});
  expect_contains(sentence([&] { Dataset(dir / "", "train", {vocab - 1, 0, {}}); }), {"vocabulary of 997", "has 996"});
}

TEST(Dataset, HashIsOfAllShards) {
  const auto hash = [](const std::vector<std::int64_t>& sizes, const std::set<std::int64_t>& masked = {}) {
    TempDir dir;
    write_shards(dir, sizes, masked);
    return Dataset(dir / "", "train", vocabulary()).hash();
  };
  const std::uint64_t first = hash({40, 60});
  EXPECT_EQ(hash({40, 60}), first);
  EXPECT_NE(hash({60, 40}), first);
  EXPECT_NE(hash({40, 61}), first);
  EXPECT_NE(hash({40, 60}, {99}), first);
}

// A damaged token is found when its row is read, on the prefetch thread as well.
TEST(Batches, DamageIsReportedFromTheThread) {
  TempDir dir;
  write_shards(dir, {100});
  std::string bytes = read_text(dir / "train_000000.bin");
  bytes[1024 + 2 * 50 + 1] = static_cast<char>(0xF0);
  write_bytes(dir / "train_000000.bin", bytes);
  const Dataset data(dir / "", "train", vocabulary());
  Batches batches(data, 9, 0, SampleOrder::sequential);
  EXPECT_EQ(batches.rows(0, 5).good_tokens, 45);
  batches.prefetch(5, 2);
  EXPECT_EQ(batches.rows(1, 2).good_tokens, 18);
  expect_contains(sentence([&] { batches.rows(5, 2); }), {"train_000000.bin", "byte 1124", "vocabulary size 997"});
  expect_contains(sentence([&] { batches.rows(5, 1); }), {"byte 1124"});
  batches.prefetch(5, 2);  // an error that nobody fetches ends with the object
}

}  // namespace
}  // namespace onescale

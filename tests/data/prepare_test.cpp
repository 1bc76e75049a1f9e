#include "data/prepare.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "data/batches.h"
#include "data/documents.h"
#include "tests/data/helpers.h"

namespace onescale {
namespace {

// A tree of 60 files and 40 JSON lines, arbitrary bytes among them.
void write_tree(const TempDir& dir) {
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    write_bytes(dir / ("tree/" + std::to_string(i % 7) + "/" + std::to_string(i) + ".py"),
                std::string(sample_code()) + arbitrary_text(random, 40));
  }
  std::string lines;
  for (int i = 0; i < 40; ++i)
    lines += "{\"text\": \"for item in items:\\n    print(" + std::to_string(i) + ")\\u2581\\n\"}\n";
  write_bytes(dir / "tree/lines.jsonl", lines);
}

PrepareOptions options_of(const TempDir& dir, const std::string& out) {
  PrepareOptions options;
  options.inputs = {dir / "tree"};
  options.out = dir / out;
  options.vocab_size = 330;
  options.validation_share = 0.2;
  options.shard_tokens = 5000;
  options.seed = 3;
  options.threads = 2;
  return options;
}

std::map<std::string, std::string> files_of(const std::string& dir) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(dir))
    files[entry.path().filename()] = read_text(entry.path());
  return files;
}

// The documents of a split as ids, end of text included.
std::vector<std::vector<std::int32_t>> documents_of(const std::string& dir, const std::string& split,
                                                    const Tokenizer& tokenizer) {
  std::vector<std::vector<std::int32_t>> documents;
  for (int number = 0;; ++number) {
    const std::string stem = str(dir, "/", split, "_00000", number);
    if (!std::filesystem::exists(stem + ".bin")) return documents;
    const Shard shard(stem + ".bin", vocabulary_of(tokenizer));
    std::int64_t begin = 0;
    for (const std::int64_t end : document_ends(stem + ".docs")) {
      std::vector<std::int32_t>& ids = documents.emplace_back(static_cast<std::size_t>(end - begin));
      std::vector<std::uint8_t> no_target(ids.size());
      shard.read(begin, end - begin, ids.data(), no_target.data());
      begin = end;
    }
    EXPECT_EQ(begin, shard.tokens());
  }
}

// Undoes fill-in-the-middle: the text of a document and how it was written.
std::string restore(const std::vector<std::int32_t>& ids, const Tokenizer& t, FimMode& mode) {
  EXPECT_EQ(ids[0], t.eot());
  const auto find = [&](std::int32_t id) { return std::find(ids.begin() + 1, ids.end(), id); };
  const auto text = [&](auto begin, auto end) { return t.decode(std::vector<std::int32_t>(begin, end)); };
  const auto prefix = find(t.fim_prefix()), suffix = find(t.fim_suffix()), middle = find(t.fim_middle());
  mode = FimMode::none;
  if (prefix == ids.end()) return text(ids.begin(), ids.end());
  mode = suffix == prefix + 1 ? FimMode::spm : FimMode::psm;
  // After <fim_middle> comes prefix + middle with spm; psm with an empty prefix looks the same and reads the same.
  if (mode == FimMode::spm) return text(middle + 1, ids.end()) + text(suffix + 1, middle);
  return text(prefix + 1, suffix) + text(middle + 1, ids.end()) + text(suffix + 1, middle);
}

TEST(Prepare, WritesWhatDecodesToTheDocuments) {
  TempDir dir;
  write_tree(dir);
  const PrepareOptions options = options_of(dir, "out");
  const PrepareSummary summary = prepare(options);
  const Tokenizer t = Tokenizer::load(dir / "out/tokenizer.model");
  EXPECT_EQ(t.vocab_size(), 330);
  EXPECT_EQ(summary.vocab_size, 330);

  std::multiset<std::string> expected, found;
  std::map<std::string, std::string> text_of;
  std::int64_t bytes = 0;
  Documents documents(options.inputs, {});
  documents.each(
      [&](const Document& d) { expected.insert(d.text), text_of[d.source] = d.text, bytes += std::ssize(d.text); });
  ASSERT_EQ(expected.size(), 100U);
  int transformed = 0;
  std::int64_t train_tokens = 0, val_tokens = 0, val_bytes = 0;
  FimMode mode{};
  const auto train = documents_of(dir / "out", "train", t), val = documents_of(dir / "out", "val", t);
  for (const auto& ids : train) {
    found.insert(restore(ids, t, mode));
    transformed += mode != FimMode::none;
    train_tokens += std::ssize(ids);
  }
  std::istringstream held_out(read_text(dir / "out/val_documents.txt"));
  for (const auto& ids : val) {
    const std::string text = restore(ids, t, mode);
    EXPECT_EQ(mode, FimMode::none);  // held-out text is plain
    std::string source;
    ASSERT_TRUE(std::getline(held_out, source));
    EXPECT_EQ(text, text_of[source]) << source;
    found.insert(text);
    val_tokens += std::ssize(ids);
    for (const std::int32_t id : ids) val_bytes += t.byte_length(id);
  }
  EXPECT_EQ(found, expected);
  EXPECT_EQ(summary.train.documents, std::ssize(train));
  EXPECT_EQ(summary.val.documents, std::ssize(val));
  EXPECT_EQ(summary.train.psm + summary.train.spm, transformed);
  EXPECT_EQ(summary.train.tokens, train_tokens);
  EXPECT_EQ(summary.val.tokens, val_tokens);
  EXPECT_EQ(summary.val.bytes, val_bytes);
  EXPECT_EQ(summary.train.bytes + summary.val.bytes, bytes);
  // Three standard deviations of 100 draws of 0.2 and of about 80 of 0.5.
  EXPECT_NEAR(static_cast<double>(summary.val.documents), 20, 12);
  EXPECT_NEAR(transformed, static_cast<double>(train.size()) / 2, 14);
  EXPECT_GT(summary.train.shards, 1);
  EXPECT_TRUE(std::filesystem::exists(dir / "out/train_000001.bin"));
}

// A document is held out where the first word of its own draw is below the share; another seed holds out others.
TEST(Prepare, HeldOutDocumentsAreThoseOfTheirDraws) {
  TempDir dir;
  std::string lines;
  for (int i = 0; i < 50; ++i) lines += str("{\"text\": \"number ", i, "\"}\n");
  write_bytes(dir / "tree/lines.jsonl", lines);
  write_bytes(dir / "model", tiny_tokenizer().model());
  for (const std::uint64_t seed : {std::uint64_t{1}, std::uint64_t{9}}) {
    PrepareOptions options = options_of(dir, str("out", seed));
    options.tokenizer = dir / "model";
    options.validation_share = 0.3;
    options.seed = seed;
    prepare(options);
    std::vector<std::string> expected, found;
    for (std::uint32_t i = 0; i < 50; ++i) {
      const std::uint32_t word = philox({i, 0, 2, static_cast<std::uint32_t>(Site::fim)}, seed)[0];
      if (word < 0.3 * 0x1p32) expected.push_back(str("number ", i));
    }
    for (const auto& ids : documents_of(options.out, "val", tiny_tokenizer()))
      found.push_back(tiny_tokenizer().decode(ids));
    EXPECT_EQ(found, expected) << seed;
    EXPECT_GT(found.size(), 5U);
  }
}

// Each piece, of 40 bytes and the rest of its line, is rearranged by draws of its own and ends with an end of text.
TEST(Prepare, FillsInWithinPieces) {
  TempDir dir;
  std::mt19937 random(2);
  std::string text;
  for (int i = 0; i < 300; ++i) text += std::string(random() % 30, static_cast<char>('a' + i % 26)) + "\n";
  write_bytes(dir / "tree/one.txt", text + "no line end");
  write_bytes(dir / "model", tiny_tokenizer().model());
  PrepareOptions options = options_of(dir, "out");
  options.tokenizer = dir / "model";
  options.shard_tokens = 1 << 20;
  options.fim_bytes = 40;
  const PrepareSummary summary = prepare(options);
  EXPECT_EQ(summary.train.documents, 1);
  const Tokenizer& t = tiny_tokenizer();
  const auto documents = documents_of(options.out, "train", t);
  ASSERT_EQ(documents.size(), 1U);
  std::string restored;
  std::int64_t rearranged = 0;
  for (auto begin = documents[0].begin(), end = documents[0].end(); begin != end;) {
    const auto stop = std::find(begin + 1, end, t.eot());
    // What lies between two ends of text is plain pieces, then one that is rearranged.
    const auto fim = std::find(begin, stop, t.fim_prefix());
    restored += t.decode(std::vector<std::int32_t>(begin, fim));
    if (fim != stop) {
      FimMode mode{};
      std::vector<std::int32_t> piece(fim, stop);
      piece.insert(piece.begin(), t.eot());
      const std::string part = restore(piece, t, mode);
      restored += part;
      ++rearranged;
      const bool last = stop == end;
      if (!last) {
        EXPECT_EQ(part.back(), '\n');
        EXPECT_GE(part.size(), 40U);
        EXPECT_LT(part.size(), 40U + 30U);
      }
    }
    begin = stop;
  }
  EXPECT_EQ(restored, text + "no line end");
  EXPECT_EQ(rearranged, summary.train.psm + summary.train.spm);
  // Pieces are some 55 bytes; half of them are rearranged, within four standard deviations.
  const double pieces = static_cast<double>(text.size()) / 55;
  EXPECT_NEAR(static_cast<double>(rearranged), pieces / 2, 2 * std::sqrt(pieces) + 6);
}

TEST(Prepare, IsTheSameForAnyNumberOfThreads) {
  TempDir dir;
  write_tree(dir);
  PrepareOptions options = options_of(dir, "one");
  options.threads = 1;
  prepare(options);
  options.out = dir / "three/";
  options.threads = 3;
  std::vector<PrepareProgress> progress;
  options.progress = [&](const PrepareProgress& p) { progress.push_back(p); };
  prepare(options);
  EXPECT_EQ(files_of(dir / "one"), files_of(dir / "three"));
  ASSERT_FALSE(progress.empty());
  EXPECT_EQ(std::string(progress.back().phase), "encoding");
  EXPECT_EQ(progress.back().bytes, progress.back().total_bytes);
  EXPECT_EQ(progress.back().seconds_left(), 0);

  options.out = dir / "other";
  options.seed = 4;
  prepare(options);
  EXPECT_NE(files_of(dir / "one"), files_of(dir / "other"));
}

TEST(Prepare, LongDocumentsAreEncodedInTasksWithoutATrace) {
  TempDir dir;
  std::string text;
  while (text.size() < 300'000) text += sample_code();
  write_bytes(dir / "tree/long.txt", text);
  PrepareOptions options = options_of(dir, "out");
  options.validation_share = 0;
  options.fim.fim = 0;
  prepare(options);
  const Tokenizer t = Tokenizer::load(dir / "out/tokenizer.model");
  std::vector<std::int32_t> expected = {t.eot()};
  for (const std::int32_t id : t.encode(text)) expected.push_back(id);
  const auto documents = documents_of(dir / "out", "train", t);
  ASSERT_EQ(documents.size(), 1U);
  EXPECT_EQ(documents[0], expected);
  EXPECT_FALSE(Dataset::exists(dir / "out", "val"));
}

// What is left of a split when there is little: the first document is always trained on.
TEST(Prepare, OneDocumentAloneIsTrainedOn) {
  TempDir dir;
  write_bytes(dir / "tree/a.py", sample_code());
  PrepareOptions options = options_of(dir, "out");
  options.validation_share = 0.99;
  options.vocab_size = 262;
  const PrepareSummary summary = prepare(options);
  EXPECT_EQ(summary.train.documents, 1);
  EXPECT_EQ(summary.val.documents, 0);
  EXPECT_EQ(summary.val.shards, 0);
  EXPECT_FALSE(Dataset::exists(dir / "out", "val"));
  expect_contains(sentence([&] { Dataset(dir / "out", "val", {}); }), {"held nothing out for val", "val_share"});
}

// The tokenizer is that of the sample alone: as large as asked for and no larger than it must be, of whole documents,
// others with another seed, and never one that is held out.
TEST(Prepare, TokenizerIsTrainedOnDocumentsThatTheSeedChooses) {
  TempDir dir;
  std::string lines;
  const std::string names = "abcdefghijklmnopqrstuvwxyz";
  for (const char c : names) {  // each document its own word, 1000 bytes
    lines += "{\"text\": \"";
    for (int i = 0; i < 200; ++i) lines += std::string(" ") + c + c + "\\n" + c;
    lines += "\"}\n";
  }
  write_bytes(dir / "tree/d.jsonl", lines);
  PrepareOptions options = options_of(dir, "out");
  options.vocab_size = 264;
  options.tokenizer_bytes = 2500;
  std::set<std::string> samples;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    options.seed = seed;
    options.out = dir / ("out" + std::to_string(seed));
    const PrepareSummary summary = prepare(options);
    EXPECT_EQ(summary.tokenizer_documents, 3);
    EXPECT_EQ(summary.tokenizer_bytes, 3000);
    const Tokenizer t = Tokenizer::load(options.out + "/tokenizer.model");
    std::set<char> held_out;
    for (const auto& ids : documents_of(options.out, "val", t)) held_out.insert(t.decode(ids)[1]);
    EXPECT_FALSE(held_out.empty());
    std::string sample;  // words of which there are pieces
    for (std::int32_t id = 0; id < t.vocab_size(); ++id) {
      const std::string piece(t.piece_bytes(id));
      if (piece.size() > 1) sample += piece;
      for (const char c : piece) EXPECT_TRUE(piece.size() == 1 || !held_out.contains(c)) << piece;
    }
    EXPECT_FALSE(sample.empty());
    samples.insert(sample);
  }
  EXPECT_GE(samples.size(), 4U);
  options.tokenizer_bytes = 1'000'000;
  options.out = dir / "all";
  const PrepareSummary all = prepare(options);
  EXPECT_EQ(all.tokenizer_documents, all.train.documents);
  EXPECT_EQ(all.tokenizer_bytes, all.train.bytes);
  expect_contains(sentence<UsageError>([&] {
                    options.tokenizer_bytes = 2500;
                    prepare(options);
                  }),
                  {"tokenizer_bytes 1000000, not 2500"});
}

TEST(Prepare, PromptsAreNoTargets) {
  TempDir dir;
  write_bytes(dir / "tree/d.jsonl",
              "{\"prompt\": \"what is 1+1?\", \"completion\": \" it is 2\"}\n{\"text\": \"import os\"}\n");
  write_bytes(dir / "code/a.py", sample_code());
  write_bytes(dir / "model", tiny_tokenizer().model());
  PrepareOptions options = options_of(dir, "out");
  options.tokenizer = dir / "model";
  options.validation_share = 0;
  options.fim.fim = 1;  // acts on plain documents alone
  prepare(options);
  const Tokenizer& t = tiny_tokenizer();
  const auto prompt = std::ssize(t.encode("what is 1+1?")), completion = std::ssize(t.encode(" it is 2"));
  const Dataset data(dir / "out", "train", vocabulary_of(t));
  std::vector<std::int32_t> ids(static_cast<std::size_t>(data.tokens()));
  std::vector<std::uint8_t> mask(ids.size());
  data.read(0, data.tokens(), ids.data(), mask.data());
  EXPECT_EQ(t.decode(std::span(ids).first(static_cast<std::size_t>(1 + prompt + completion))), "what is 1+1? it is 2");
  for (std::int64_t i = 0; i < data.tokens(); ++i)
    EXPECT_EQ(mask[static_cast<std::size_t>(i)] != 0, i >= 1 && i <= prompt) << i;
}

TEST(Prepare, ReusesOrRefusesWhatIsThere) {
  TempDir dir;
  write_tree(dir);
  PrepareOptions options = options_of(dir, "out");
  const PrepareSummary first = prepare(options);
  EXPECT_FALSE(first.reused);
  options.threads = 1;
  const PrepareSummary second = prepare(options);
  EXPECT_TRUE(second.reused);
  EXPECT_EQ(second.train.tokens, first.train.tokens);
  EXPECT_EQ(second.val.bytes, first.val.bytes);
  const auto before = files_of(dir / "out");
  options.seed = 9;
  expect_contains(sentence<UsageError>([&] { prepare(options); }),
                  {"out exists", "seed \"3\"", "not \"9\"", "another directory"});
  options.seed = 3;
  write_bytes(dir / "tree/new.py", "x");
  expect_contains(sentence<UsageError>([&] { prepare(options); }), {"out exists", "files 61, not 62"});
  std::filesystem::remove(dir / "tree/new.py");
  std::string edited = read_text(dir / "tree/0/0.py");
  edited[0] = 'I';  // of the same length
  write_bytes(dir / "tree/0/0.py", edited);
  expect_contains(sentence<UsageError>([&] { prepare(options); }), {"out exists", "input_hash", "remove it"});
  EXPECT_EQ(files_of(dir / "out"), before);
  write_bytes(dir / "mine/notes.txt", "keep me");
  options.out = dir / "mine";
  expect_contains(sentence<UsageError>([&] { prepare(options); }), {"mine exists and is not a prepared data set"});
  EXPECT_EQ(read_text(dir / "mine/notes.txt"), "keep me");
}

TEST(Prepare, ReusesWhatWasMadeOfTheSameInputsElsewhere) {
  TempDir dir;
  write_tree(dir);
  PrepareOptions options = options_of(dir, "out");
  prepare(options);
  std::filesystem::rename(dir / "tree", dir / "moved");
  options.inputs = {dir / "moved/"};
  EXPECT_TRUE(prepare(options).reused);
  write_bytes(dir / "a.model", read_text(dir / "out/tokenizer.model"));
  write_bytes(dir / "b.model", read_text(dir / "out/tokenizer.model"));
  options.out = dir / "given";
  options.tokenizer = dir / "a.model";
  EXPECT_FALSE(prepare(options).reused);
  options.tokenizer = dir / "b.model";
  EXPECT_TRUE(prepare(options).reused);
}

// prepare.json knows what lies beside it.
TEST(Prepare, ShardsThatAreMissingOrTooManyAreFound) {
  TempDir dir;
  write_tree(dir);
  PrepareOptions options = options_of(dir, "out");
  options.shard_tokens = 2000;
  const PrepareSummary summary = prepare(options);
  ASSERT_GE(summary.train.shards, 3);
  const std::string second = dir / "out/train_000001.bin",
                    last = str(dir / "out/train_00000", summary.train.shards - 1, ".bin");
  const auto open = [&](const std::string& split) { return sentence([&] { Dataset(dir / "out/", split, {}); }); };
  EXPECT_EQ(open("train"), "");
  for (const std::string& missing : {second, last}) {
    std::filesystem::rename(missing, dir / "away");
    expect_contains(open("train"), {std::filesystem::path(missing).filename(), "is missing", "prepare.json"});
    std::filesystem::rename(dir / "away", missing);
  }
  std::filesystem::copy(second, dir / "out/train_extra.bin");
  expect_contains(open("train"), {str(summary.train.shards + 1, " shards"),
                                  str("prepare.json says ", summary.train.tokens, " in ", summary.train.shards)});
  std::filesystem::remove(dir / "out/train_extra.bin");
  std::filesystem::copy_file(last, second, std::filesystem::copy_options::overwrite_existing);
  expect_contains(open("train"), {"prepare.json says", "copy the directory whole"});
  for (const auto& entry : std::filesystem::directory_iterator(dir / "out")) {
    if (entry.path().filename().string().starts_with("val_")) std::filesystem::remove(entry.path());
  }
  EXPECT_TRUE(Dataset::exists(dir / "out", "val"));  // it had been
  expect_contains(open("val"), {"val_000000.bin", "is missing"});
}

TEST(Prepare, FailuresLeaveNothing) {
  TempDir dir;
  write_tree(dir);
  write_bytes(dir / "tree/zzz.jsonl", "{\"text\": \"a\"}\n{\"text\": broken}\n");
  PrepareOptions options = options_of(dir, "out");
  write_bytes(dir / "out.partial/notes.txt", "keep me");  // not ours
  expect_contains(sentence([&] { prepare(options); }), {"zzz.jsonl line 2"});
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
  EXPECT_EQ(read_text(dir / "out.partial/notes.txt"), "keep me");
  std::filesystem::remove_all(dir / "out.partial");
  for (const auto& entry : std::filesystem::directory_iterator(dir / ".")) EXPECT_EQ(entry.path().filename(), "tree");

  options.inputs = {dir / "tree/0"};
  options.out = "/proc/out";
  expect_contains(sentence([&] { prepare(options); }), {"/proc/out", "cannot be made"});
  options.out = "";
  expect_contains(sentence<UsageError>([&] { prepare(options); }), {"No output directory"});
  options.out = dir / "out";
  write_bytes(dir / "empty/a.jsonl", "{\"text\": \"\"}\n\n{\"prompt\": \"\", \"completion\": \"\"}\n");
  write_bytes(dir / "empty/b.py", "");
  options.inputs = {dir / "empty"};
  write_bytes(dir / "model", tiny_tokenizer().model());
  for (const std::string& tokenizer : {std::string(), dir / "model"}) {
    options.tokenizer = tokenizer;
    expect_contains(sentence<UsageError>([&] { prepare(options); }),
                    {"hold 2 files without a text that is not empty", "nothing to prepare"});
  }
  options.tokenizer = "";
  options.inputs = {dir / "tree/0"};
  options.validation_share = 0;
  options.vocab_size = 100'000;
  expect_contains(sentence<UsageError>([&] { prepare(options); }), {"vocab_size is 100000", "at most"});
  options.vocab_size = 330;
  options.fim.fim = 1.5;
  expect_contains(sentence<UsageError>([&] { prepare(options); }), {"fim_rate is 1.5", "between 0 and 1"});
}

}  // namespace
}  // namespace onescale

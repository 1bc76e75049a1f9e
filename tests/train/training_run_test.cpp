#include "train/training_run.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "parallel/file.h"
#include "tests/runs.h"
#include "train/commands.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

class TrainingRuns : public testing::Test {
 protected:
  // Some hundred short documents, prepared once for all tests.
  static void SetUpTestSuite() {
    dir = new TempDir;  // NOLINT: lives until TearDownTestSuite
    root = dir->path();
    prepare_documents(*dir);
  }
  static void TearDownTestSuite() { delete dir; }

  // Dropout, accumulation, clipping, evaluation and samples all on.
  static Options options(const std::string& run) {
    Options o;
    o.command = "train";
    o.letter = 't';
    o.data = root + "/data";
    o.run_dir = root + "/" + run;
    o.n_layer = 2;
    o.n_head = 3;
    o.n_embd = 48;
    o.n_positions = 32;
    o.embd_pdrop = 0.1, o.attn_pdrop = 0.1, o.resid_pdrop = 0.1;
    o.steps = 10;
    o.global_batch = 4;
    o.micro_batch = 2;
    o.lr = 1e-3;
    o.warmup_steps = 3;
    o.clip_norm = 0.5;
    o.eval_every = 5;
    o.eval_rows = 4;
    o.sample_every = 5;
    o.sample_tokens = 4;
    o.save_every = 5;
    o.keep_last = 10;
    o.threads = 2;
    return o;
  }

  // metrics.jsonl without what a clock tells.
  static std::vector<std::string> metrics(const std::string& run) {
    std::vector<std::string> lines;
    for (const Json& line : read_metrics(str(root, "/", run))) lines.push_back(timeless(line));
    return lines;
  }
  static void expect_same_run(const std::string& a, const std::string& b, const std::string& step) {
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
      const auto of = [&](const std::string& run) {
        return read_text(str(root, "/", run, "/checkpoints/", step, "/", file));
      };
      ASSERT_FALSE(of(a).empty());
      EXPECT_EQ(of(a), of(b)) << file;
    }
    EXPECT_EQ(metrics(a), metrics(b));
  }

  static TempDir* dir;
  static std::string root;
  World world;
};
TempDir* TrainingRuns::dir = nullptr;
std::string TrainingRuns::root;

// A run goes on bitwise on a processor with other vectors: one at v3, one at v4, one that changes in the middle. Sizes
// over which products cut their sums, and tails that fill no vector.
TEST_F(TrainingRuns, LevelsGiveTheSameBits) {
  if (cpu_levels().size() < 2) GTEST_SKIP() << "this processor has one level alone";
  for (const bool multi_query : {true, false}) {
    const auto wide = [&](const std::string& run, const char* isa) {
      Options o = options(str(run, multi_query));
      o.isa = isa;
      o.multi_query = multi_query;
      o.n_embd = 51, o.n_inner = 1600;
      return o;
    };
    ASSERT_EQ(train_command(wide("at_v3_", "v3"), world), 0);
    ASSERT_EQ(train_command(wide("at_v4_", "v4"), world), 0);
    Options first = wide("at_both_", "v3");
    first.stop_after = 5;
    ASSERT_EQ(train_command(first, world), 75);
    ASSERT_EQ(train_command(wide("at_both_", "v4"), world), 0);
    for (const char* run : {"at_v4_", "at_both_"})
      expect_same_run(str("at_v3_", multi_query), str(run, multi_query), "step-00000010");
  }
}

TEST_F(TrainingRuns, ResumeIsBitwiseInWeightsMomentsAndMetrics) {
  EXPECT_EQ(TrainingRun(options("whole"), world).run(), 0);
  for (const std::int64_t stop : {5, 7}) {  // at a checkpoint that is due, and between two
    Options o = options(str("cut", stop));
    o.stop_after = stop;
    EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
    o.stop_after = 0;
    o.threads = 1;  // nothing depends on their number
    EXPECT_EQ(TrainingRun(o, world).run(), 0);
    expect_same_run("whole", str("cut", stop), "step-00000010");
    EXPECT_EQ(TrainingRun(o, world).run(), 0);  // finished: says so and changes nothing
    expect_same_run("whole", str("cut", stop), "step-00000010");
  }
}

TEST_F(TrainingRuns, OtherMicroBatchesGiveTheSameLosses) {
  Options o = options("micro1");
  o.micro_batch = 1;
  TrainingRun(o, world).run();
  o = options("micro4");
  o.micro_batch = 4;
  TrainingRun(o, world).run();
  const auto a = metrics("micro1"), b = metrics("micro4");
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    const Json x = Json::parse(a[i], "a"), y = Json::parse(b[i], "b");
    if (!x.has("loss")) continue;
    EXPECT_NEAR(x.at("loss").number() / y.at("loss").number(), 1, 1e-5);  // float32 sums in another order
  }
}

TEST_F(TrainingRuns, StopsSavesAndGoesOnAfterASignal) {
  TrainingRun run(options("signal"), world);
  std::raise(SIGUSR1);
  EXPECT_EQ(run.run(), exit_requeue);
  EXPECT_TRUE(fs::exists(root + "/signal/checkpoints/step-00000000/trainer.json"));
}

TEST_F(TrainingRuns, GoesOnWhereAStartWasKilled) {
  fs::create_directory(root + "/killed");
  for (const char* name : {"/.lock", "/log.txt", "/metrics.jsonl"}) std::ofstream(root + "/killed" + name);
  Options o = options("killed");
  o.n_head = 5;  // does not divide: refused, and the place is as it was
  EXPECT_THROW(TrainingRun(o, world), UsageError);
  EXPECT_TRUE(fs::exists(root + "/killed/.lock"));
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  waitpid(dead, nullptr, 0);
  for (const char* name : {"config.toml", "metrics.jsonl"})
    std::ofstream(str(root, "/killed/", name, ".partial-", dead, "-0")) << "half";
  o = options("killed");
  o.stop_after = 1;
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
  EXPECT_EQ(names(root + "/killed"),
            (std::set<std::string>{".lock", "checkpoints", "config.toml", "log.txt", "metrics.jsonl"}));
}

TEST_F(TrainingRuns, RefusesASecondProcessAndOtherSettings) {
  Options o = options("busy");
  o.stop_after = 1;
  {
    TrainingRun first(o, world);
    EXPECT_THROW(TrainingRun(o, world), Error);
    first.run();
  }
  o.n_layer = 3;
  EXPECT_THROW(TrainingRun(o, world), UsageError);
}

TEST_F(TrainingRuns, IsAFailureWhereItsDirectoryGoes) {
  for (const std::int64_t save_every : {0, 1}) {
    const std::string run = str("gone", save_every);
    Options o = options(run);
    o.steps = 1'000'000;
    o.save_every = save_every;
    TrainingRun training(o, world);
    std::thread mover([&] {
      while (read_metrics(o.run_dir).size() < 4) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      fs::rename(o.run_dir, o.run_dir + "_moved");
    });
    const std::string said = sentence([&] { training.run(); });
    mover.join();
    EXPECT_EQ(said, str("run_dir ", o.run_dir,
                        " was removed, moved or replaced while the run went on; put it back, or start again"));
    EXPECT_FALSE(fs::exists(o.run_dir));
  }
}

// Killed between the last checkpoint and the end of what is due after it: it is not finished yet.
TEST_F(TrainingRuns, MakesTheLastEvaluationThatAKillCutOff) {
  TrainingRun(options("cut_off"), world).run();
  const std::string file = root + "/cut_off/metrics.jsonl", whole = read_text(file);
  const std::vector<std::string> before = metrics("cut_off");
  ASSERT_NE(before.back().find("sample"), std::string::npos);
  const std::size_t sample = whole.rfind('\n', whole.size() - 2) + 1, eval = whole.rfind('\n', sample - 2) + 1;
  for (const std::size_t end : {sample - 3, sample, eval + 5, eval}) {
    write_text(file, whole.substr(0, end));
    EXPECT_EQ(TrainingRun(options("cut_off"), world).run(), 0);
    EXPECT_EQ(metrics("cut_off"), before) << end;
  }
}

// A file system that is full, where the process may mount one.
TEST_F(TrainingRuns, MakesRoomOnAFullDiskButNeverOfTheNewest) {
  const TempDir disk;
  const auto mounted = [&](std::int64_t bytes) {
    umount2(disk.path().c_str(), MNT_DETACH);
    return mount("onescale_test", disk.path().c_str(), "tmpfs", 0, str("size=", bytes).c_str()) == 0;
  };
  Options o = options("roomy");
  o.n_embd = 96;
  o.save_every = 1;
  o.steps = 6;
  o.keep_last = 3;
  TrainingRun(o, world).run();
  std::int64_t one = 0;
  for (const auto& file : fs::directory_iterator(root + "/roomy/checkpoints/step-00000006"))
    one += static_cast<std::int64_t>(file.file_size());
  ASSERT_GT(one, 2'000'000);  // the room that a save asks for is one and 1 MB
  const auto failed = [&] {
    const std::vector<Json> lines = read_metrics(o.run_dir);
    return std::count_if(lines.begin(), lines.end(), [](const Json& line) {
      return line.has("event") && line.at("event").string() == "save_failed";
    });
  };
  const auto checkpoints = [&] { return names(o.run_dir + "/checkpoints"); };
  if (!mounted(4 * one - 500'000)) GTEST_SKIP() << "no right to mount a tmpfs";
  o.run_dir = disk / "run";
  EXPECT_EQ(TrainingRun(o, world).run(), 0);  // what goes after a save goes before it
  EXPECT_EQ(failed(), 0);
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step-00000004", "step-00000005", "step-00000006"}));
  {
    std::ofstream filler(disk / "filler", std::ios::binary);
    while (filler << std::string(4096, 'x') << std::flush) continue;
  }
  o.steps = 7;
  o.keep_last = 1;
  EXPECT_EQ(TrainingRun(o, world).run(), 0);
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step-00000007"});
  ASSERT_TRUE(mounted(2 * one - 500'000));  // room for one, and not for a second beside it
  o.steps = 3;
  EXPECT_EQ(sentence([&] { TrainingRun(o, world).run(); }),
            str("step 3, the last, could not be saved in ", o.run_dir,
                ": see log.txt there for why, then start the same command again"));
  EXPECT_EQ(failed(), 2);
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step-00000001"});
  const std::string log = read_text(o.run_dir + "/log.txt");
  EXPECT_NE(log.find(" MB; free some space\n"), std::string::npos) << log;
  umount2(disk.path().c_str(), MNT_DETACH);
}

// Cosine from 1e-3 to 1e-4 over 10 steps is at 1e-4 + 4.5e-4 (1 + cos(0.9 pi)) = 1.2202525e-4 at its last, step 9; over
// 20, step 10 has the middle, 5.5e-4.
TEST_F(TrainingRuns, SaysWhatRaisedStepsDoToTheLearningRate) {
  Options o = options("raised");
  o.min_lr = 1e-4;
  o.warmup_steps = 0;
  TrainingRun(o, world).run();
  TrainingRun(o, world).run();
  const auto said = [&] { return read_text(o.run_dir + "/log.txt").find("the learning rate goes from "); };
  EXPECT_EQ(said(), std::string::npos);
  o.steps = 20;
  o.stop_after = 1;
  TrainingRun(o, world).run();
  ASSERT_NE(said(), std::string::npos);
  const std::string log = read_text(o.run_dir + "/log.txt");
  EXPECT_EQ(
      log.substr(said(), log.find('\n', said()) - said()),
      "the learning rate goes from 0.000122025 at the last step to 0.00055 by these changes; it stays with schedule "
      "constant and lr 0.000122025");
  fs::remove(o.run_dir + "/log.txt");
  TrainingRun(o, world).run();
  EXPECT_EQ(said(), std::string::npos);
}

TEST_F(TrainingRuns, OneRankTakesRowsOfAnyLengthInEveryMode) {
  std::vector<std::string> lines;
  for (const char* mode : {"ulysses", "gather_kv"}) {
    Options o = options(str("odd_", mode));
    o.sp_mode = mode;
    o.seq_len = 13;
    o.steps = 2;
    EXPECT_EQ(TrainingRun(o, world).run(), 0);
    lines.push_back(metrics(str("odd_", mode)).back());
  }
  EXPECT_EQ(lines[0], lines[1]);
}

TEST_F(TrainingRuns, RefusesOtherDataUnderTheSameName) {
  const std::string data = root + "/moved";
  fs::copy(root + "/data", data, fs::copy_options::recursive);
  Options o = options("other_data");
  o.data = data;
  o.stop_after = 2;
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
  PrepareOptions prepare_options;
  prepare_options.inputs = {root + "/text"};
  prepare_options.patterns = {"*.py"};
  prepare_options.out = root + "/anew";
  prepare_options.tokenizer = data + "/tokenizer.model";
  prepare_options.validation_share = 0.1;
  prepare_options.fim.fim = 1;
  prepare(prepare_options);
  fs::rename(data, root + "/away");
  fs::rename(root + "/anew", data);
  EXPECT_THROW(TrainingRun(o, world).run(), UsageError);
  fs::rename(data, root + "/anew");
  o.data = root + "/anew";
  EXPECT_THROW(TrainingRun(o, world).run(), UsageError);
  // The same data elsewhere, or by another path, go on with the bits of a run that was left alone.
  o.data = fs::relative(root + "/away");
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
  fs::rename(root + "/away", data);
  o.data = data + "/.";
  o.stop_after = 0;
  EXPECT_EQ(TrainingRun(o, world).run(), 0);
  TrainingRun(options("undisturbed"), world).run();
  expect_same_run("undisturbed", "other_data", "step-00000010");
}

TEST_F(TrainingRuns, OneDocumentAloneIsTrainedWithoutEvaluation) {
  std::ofstream(root + "/one.py") << std::string(4000, 'x');
  PrepareOptions prepare_options;
  prepare_options.inputs = {root + "/one.py"};
  prepare_options.out = root + "/one";
  prepare_options.tokenizer = root + "/data/tokenizer.model";
  prepare(prepare_options);
  Options o = options("one_run");
  o.data = prepare_options.out;
  o.given = {"eval_every"};
  EXPECT_NE(sentence([&] { TrainingRun(o, world); }).find("leave eval_every out"), std::string::npos);
  o.given = {};
  o.stop_after = 5;
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
  o.stop_after = 0;
  EXPECT_EQ(TrainingRun(o, world).run(), 0);
  for (const std::string& line : metrics("one_run")) EXPECT_EQ(line.find("eval"), std::string::npos) << line;
  const std::string log = read_text(root + "/one_run/log.txt");
  EXPECT_NE(log.find("nothing is held out"), std::string::npos);
  EXPECT_EQ(log.find("eval_every was"), std::string::npos);
}

TEST_F(TrainingRuns, StopsAfterTooManyBadStepsWithTheCheckpointIntact) {
  Options o = options("bad");
  o.steps = 40;
  o.stop_after = 5;
  TrainingRun(o, world).run();
  const std::string before = read_text(root + "/bad/checkpoints/step-00000005/model.safetensors");
  o.stop_after = 0;
  o.lr = 1e30;  // the next update makes every later loss infinite
  o.min_lr = 1e30;
  o.save_every = 1;  // none is saved, so none removed, while steps are bad
  o.keep_last = 2;
  o.max_bad_steps = 3;
  o.sample_every = 1;  // which the damaged weights cannot give
  EXPECT_EQ(sentence([&] { TrainingRun(o, world).run(); }),
            "step 9: loss or gradient was not finite in 3 steps in a row (max_bad_steps); the checkpoint of step 6 has "
            "these weights, remove it and go on with a lower lr");
  EXPECT_NE(read_text(root + "/bad/log.txt").find("step 6 sample: none, the model's logits are not finite"),
            std::string::npos);
  EXPECT_EQ(read_text(root + "/bad/checkpoints/step-00000005/model.safetensors"), before);
  const std::vector<std::string> lines = metrics("bad");
  EXPECT_EQ(Json::parse(lines.back(), "metrics").at("skipped_steps").integer(), 3);
  fs::remove_all(root + "/bad/checkpoints/step-00000006");
  o.lr = o.min_lr = 1e-3;
  o.steps = 8;
  EXPECT_EQ(TrainingRun(o, world).run(), 0);
}

TEST_F(TrainingRuns, IsAFailureWhereTheLastWeightsGiveNoLoss) {
  Options o = options("broken");
  o.steps = 1;
  o.lr = o.min_lr = 1e30;
  o.warmup_steps = 0;
  const std::string said = sentence([&] { TrainingRun(o, world).run(); });
  EXPECT_TRUE(said.starts_with("the held-out loss after the last step is ")) << said;
  EXPECT_TRUE(said.ends_with("the checkpoint of step 1 has these weights, remove it and go on with a lower lr"))
      << said;
  Options never = options("never");
  never.max_bad_steps = 2;
  never.lr = never.min_lr = 1e30;
  never.warmup_steps = never.save_every = 0;
  EXPECT_TRUE(sentence([&] {
                TrainingRun(never, world).run();
              }).ends_with("there is no checkpoint of before, start again with a lower lr"));
}

TEST_F(TrainingRuns, TakesDataOfTheModelsTokenizerAlone) {
  Options o = options("first");
  o.stop_after = 1;
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
  PrepareOptions other;
  other.inputs = {root + "/text"};
  other.patterns = {"*.py"};
  other.out = root + "/other";
  other.vocab_size = 290;
  other.threads = 1;
  prepare(other);
  o.model = o.run_dir;
  o.run_dir = root + "/second";
  o.data = other.out;
  EXPECT_EQ(sentence<UsageError>([&] { TrainingRun(o, world); }),
            str("the tokenizer in ", other.out, " is not that of ", o.model,
                "/checkpoints/step-00000001; prepare the text with --tokenizer ", o.model,
                "/checkpoints/step-00000001/tokenizer.model"));
  EXPECT_FALSE(fs::exists(o.run_dir));
  // Shards say whose they are, so their own copy of it is not needed, and the run goes on with the model's.
  const std::string bare = root + "/bare";
  fs::copy(root + "/data", bare);
  fs::remove(bare + "/tokenizer.model");
  o.data = bare;
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
  EXPECT_EQ(read_text(o.run_dir + "/checkpoints/step-00000002/tokenizer.model"),
            read_text(root + "/data/tokenizer.model"));
  fs::remove(other.out + "/tokenizer.model");
  o.data = other.out;
  o.run_dir = root + "/third";
  EXPECT_NE(sentence([&] { TrainingRun(o, world); }).find("another tokenizer"), std::string::npos);
}

}  // namespace
}  // namespace onescale

#include "train/training_run.h"

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

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
  o = options("killed");
  o.stop_after = 1;
  EXPECT_EQ(TrainingRun(o, world).run(), exit_requeue);
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
  EXPECT_THROW(TrainingRun(o, world).run(), Error);
  EXPECT_EQ(read_text(root + "/bad/checkpoints/step-00000005/model.safetensors"), before);
  const std::vector<std::string> lines = metrics("bad");
  EXPECT_EQ(Json::parse(lines.back(), "metrics").at("skipped_steps").integer(), 3);
}

}  // namespace
}  // namespace onescale

// `mpirun onescale train` as its users start, stop, break and resume it. Every layout is compared with one process.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "model/hf_files.h"
#include "parallel/file.h"
#include "tests/job.h"
#include "tests/runs.h"
#include "train/checkpoint.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

class Training : public testing::Test {
 protected:
  // Some hundred short documents, prepared once, and a run with dropout, accumulation, clipping, evaluation and samples
  // whose vocabulary no tp divides.
  static void SetUpTestSuite() {
    root = new TempDir;
    prepare_documents(*root);
    std::ofstream(*root / "base.toml")
        << "data = \"" << *root / "data"
        << "\"\nvocab_size = 301\nn_layer = 2\nn_head = 8\nn_embd = 64\n"
        << "n_positions = 32\nsteps = 10\nglobal_batch = 8\nmicro_batch = 1\nlr = 1e-3\nmin_lr = 1e-4\n"
        << "warmup_steps = 3\nclip_norm = 0.5\neval_every = 5\neval_rows = 5\nsample_every = 5\nsample_tokens = 4\n"
        << "save_every = 5\nkeep_last = 10\nlog_every = 5\nthreads = 1\n";
    ASSERT_EQ(train(1, "one").code, 0);
  }
  static void TearDownTestSuite() { delete root; }

  static std::string dir(const std::string& run) { return *root / run; }
  static std::string command(int ranks, const std::string& run, const std::string& options,
                             const std::string& launcher = "") {
    return str(ranks == 1 ? "" : MPIRUN " " + launcher + " -n " + std::to_string(ranks) + " ", ONESCALE,
               " train --config ", *root / "base.toml", " --run_dir ", dir(run), " ", options);
  }
  static Ended train(int ranks, const std::string& run, const std::string& options = "") {
    return run_job(command(ranks, run, options));
  }

  static std::vector<Json> metrics(const std::string& run) { return read_metrics(dir(run)); }
  static std::string checkpoint(const std::string& run, int step) {
    char name[32];
    std::snprintf(name, sizeof name, "/checkpoints/step-%08d", step);
    return dir(run) + name;
  }
  static std::map<std::string, std::vector<float>> tensors(const std::string& path) {
    std::map<std::string, std::vector<float>> all;
    for (const char* stem : {"model", "optimizer"}) {
      const SafetensorsReader set(path, stem);
      for (const StoredTensor& tensor : set.tensors()) {
        std::vector<float>& values = all[tensor.name];
        values.resize(static_cast<std::size_t>(tensor.numel()));
        set.read(tensor, 0, tensor.numel(), values.data());
      }
    }
    return all;
  }
  static void expect_bitwise(const std::string& a, const std::string& b) {
    EXPECT_TRUE(tensors(checkpoint(a, 10)) == tensors(checkpoint(b, 10))) << a << " and " << b;
    const std::vector<Json> x = metrics(a), y = metrics(b);
    ASSERT_EQ(x.size(), y.size());
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(timeless(x[i]), timeless(y[i]));
  }
  // Sums of float32 in another order, over ten steps; what was read, evaluated and sampled is the same.
  static void expect_close(const std::string& a, const std::string& b) {
    const std::vector<Json> x = metrics(a), y = metrics(b);
    ASSERT_EQ(x.size(), y.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (x[i].has("loss")) {
        EXPECT_NEAR(y[i].at("loss").number() / x[i].at("loss").number(), 1, 1e-5) << b << i;
      }
      for (const char* key : {"step", "batch_hash", "good_tokens", "text", "clipped_steps"}) {
        ASSERT_EQ(x[i].has(key), y[i].has(key)) << b << i;
        if (x[i].has(key)) {
          EXPECT_EQ(x[i].at(key).dump(), y[i].at(key).dump()) << b << i;
        }
      }
    }
  }

  static TempDir* root;
};
TempDir* Training::root = nullptr;

TEST_F(Training, EveryLayoutReadsEvaluatesAndSamplesAsOneProcess) {
  const std::pair<int, const char*> layouts[] = {{2, "--zero 1"},
                                                 {4, "--zero 2"},
                                                 {4, "--tp 4"},
                                                 {4, "--sp 2 --tp 2 --zero 3"},
                                                 {4, "--sp 4 --sp_mode gather_kv --zero 3"},
                                                 {8, "--sp 2 --tp 2 --zero 3"}};
  int i = 0;
  for (const auto& [ranks, options] : layouts) {
    const std::string run = str("layout", i++);
    ASSERT_EQ(train(ranks, run, options).code, 0) << options;
    expect_close("one", run);
    EXPECT_EQ(metrics(run)[0].has("exposed_wait"), true);
  }
}

TEST_F(Training, TheSameLayoutResumesBitwise) {
  const std::string layout = "--tp 2 --zero 2";
  ASSERT_EQ(train(4, "whole", layout).code, 0);
  for (const int stop : {5, 7}) {  // at a checkpoint that is due, and between two
    const std::string run = str("cut", stop);
    EXPECT_EQ(train(4, run, layout + " --stop_after " + std::to_string(stop)).code, 75);
    EXPECT_EQ(train(4, run, layout).code, 0);
    expect_bitwise("whole", run);
  }
  const Ended again = train(4, "whole", layout);  // finished: says so and changes nothing
  EXPECT_EQ(again.code, 0);
  EXPECT_EQ(again.error, "");
  expect_bitwise("whole", "cut5");
}

TEST_F(Training, OtherLayoutsResume) {
  const std::pair<int, const char*> parts[] = {
      {1, ""}, {4, "--sp 2 --tp 2 --zero 3"}, {2, "--zero 1"}, {8, "--tp 8"}, {4, "--zero 0"}};
  for (const auto& [ranks, options] : parts) {
    const bool last = ranks == 4 && std::string(options) == "--zero 0";
    EXPECT_EQ(train(ranks, "moved", str(options, last ? "" : " --stop_after 2")).code, last ? 0 : 75) << options;
  }
  expect_close("one", "moved");
  const std::string log = read_text(dir("moved") + "/log.txt");
  EXPECT_NE(log.find("changed since the checkpoint: world was 8, is 4"), std::string::npos) << log;
}

// A job in the background.
class Job {
 public:
  explicit Job(const std::string& command) : pid_(fork()) {
    if (pid_ == 0) {
      const int null = open("/dev/null", O_RDWR);
      for (const int fd : {0, 1, 2}) dup2(null, fd);
      execl("/bin/sh", "sh", "-c", ("export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0; exec " + command).c_str(),
            nullptr);
      _exit(127);
    }
  }
  ~Job() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  pid_t pid() const { return pid_; }
  std::vector<pid_t> ranks() const {
    std::ifstream file(str("/proc/", pid_, "/task/", pid_, "/children"));
    std::vector<pid_t> all;
    for (pid_t child; file >> child;) all.push_back(child);
    return all;
  }
  int wait() {
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

void wait_for(const std::function<bool()>& reached) {
  for (int i = 0; i < 2000 && !reached(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_TRUE(reached());
}

struct Stop {
  const char* name;
  int signal;
  bool launcher;  // sent to mpirun, which passes it on; else to one rank
  int times, code;
  const char* options;
  const char* mpirun = "";
};

class Signals : public Training, public testing::WithParamInterface<Stop> {};

TEST_P(Signals, EveryRankSavesAndTheRunGoesOn) {
  const Stop& stop = GetParam();
  const std::string run = str("signal_", stop.name);
  const std::string endless = str("--steps 100000 --decay_steps 10 --save_every 100000 --tp 2 ", stop.options);
  Job job(command(4, run, endless, stop.mpirun));
  wait_for([&] { return metrics(run).size() > 2; });
  ASSERT_EQ(job.ranks().size(), 4u);
  for (int i = 0; i < stop.times; ++i) kill(stop.launcher ? job.pid() : job.ranks().back(), stop.signal);
  EXPECT_EQ(job.wait(), stop.code);
  const std::set<std::string> saved = names(dir(run) + "/checkpoints");
  ASSERT_EQ(saved.size(), 1u);
  const Checkpoint found(dir(run) + "/checkpoints/" + *saved.begin());
  const std::int64_t step = found.state().step;
  EXPECT_EQ(found.state().samples, 8 * step);
  std::int64_t last = -1;
  for (const Json& line : metrics(run)) last = line.has("event") ? last : line.at("step").integer();
  EXPECT_EQ(last + 1, step);
  EXPECT_EQ(train(2, run, str("--steps ", step + 1, " --decay_steps 10 --eval_every 0 --sample_every 0")).code, 0);
}

// mpirun 4.1 answers INT and TERM by SIGCONT, after odls_base_sigkill_timeout seconds SIGTERM, after as many SIGKILL,
// and itself leaves with 1.
INSTANTIATE_TEST_SUITE_P(, Signals,
                         testing::Values(Stop{"usr1", SIGUSR1, true, 1, 75, ""},
                                         Stop{"usr1_twice", SIGUSR1, true, 2, 75, ""},
                                         Stop{"usr1_rank", SIGUSR1, false, 1, 75, "--zero 3"},
                                         Stop{"usr1_eval", SIGUSR1, true, 1, 75, "--eval_every 1 --eval_rows 1000000"},
                                         Stop{"int_rank", SIGINT, false, 1, 75, "--global_batch 8 --zero 2"},
                                         Stop{"term_rank", SIGTERM, false, 2, 75, "--eval_every 1 --eval_rows 1000000"},
                                         Stop{"int", SIGINT, true, 1, 1, "", "--mca odls_base_sigkill_timeout 2"},
                                         Stop{"term", SIGTERM, true, 1, 1, "", "--mca odls_base_sigkill_timeout 2"}),
                         [](const testing::TestParamInfo<Stop>& info) { return std::string(info.param.name); });

TEST_F(Training, AKilledRankCostsTheStepsSinceTheLastCheckpoint) {
  {
    Job job(command(4, "killed", "--zero 3 --save_every 1 --steps 100000 --decay_steps 10"));
    wait_for([] { return fs::exists(checkpoint("killed", 2)); });
    kill(job.ranks().back(), SIGKILL);
    EXPECT_NE(job.wait(), 0);
  }
  const std::int64_t step = find_checkpoint(dir("killed"), *make_single_communicator("world")).checkpoint->state().step;
  EXPECT_EQ(train(4, "killed", str("--zero 3 --decay_steps 10 --steps ", step + 2)).code, 0);
  for (const std::string& name : names(dir("killed") + "/checkpoints")) EXPECT_TRUE(name.starts_with("step-")) << name;
}

TEST_F(Training, TimeUpSavesOnEveryRank) {
  EXPECT_EQ(train(4, "minutes", "--steps 100000 --zero 1 --max_minutes 0.02").code, 75);
  EXPECT_FALSE(names(dir("minutes") + "/checkpoints").empty());
}

TEST_F(Training, WhatIsWrongIsSaidOnceAndLeavesNothing) {
  ASSERT_EQ(train(2, "known", "--stop_after 1").code, 75);
  fs::create_directories(*root / "other");
  std::ofstream(*root / "other/file") << "x";
  const std::string data = *root / "data";
  struct Wrong {
    int ranks;
    std::string run, options, sentence;
  };
  const Wrong wrongs[] = {
      {4, "new", "--data /nowhere", "data /nowhere is not a directory; give one that onescale prepare has written"},
      {2, "new", "--sp 3",
       "sp 3 * tp 1 = 3 does not divide the 2 ranks of this job; start a multiple of 3 ranks or lower sp or tp"},
      {4, "new", "--global_batch 6", "global_batch is 6, no multiple of dp 4; the nearest that fit are 4 and 8"},
      {4, "new", "--sp 4 --n_head 2",
       "n_head is 2, which sp 4 does not divide; sp may be 1 or 2, or sp_mode gather_kv takes any number of heads"},
      {2, "new", "--sp 2 --seq_len 31",
       "seq_len is 31, no multiple of sp 2; the nearest that fit are 30 and 32, or lower sp"},
      {4, "known", "--n_layer 3",
       "run_dir " + dir("known") + " holds a run with n_layer = 2, not 3; give that value or another run_dir"},
      {2, "other", "", "run_dir " + dir("other") + " holds files but no run; give a new directory or an empty one"},
      {2, "new", "--data " + dir("other"), data},
      {4, "new", "--trace /nowhere/trace.json",
       "/nowhere/trace.json: cannot be opened: No such file or directory; check the path and its rights"},
      {2, "other/file/run", "", "run_dir"},
  };
  const std::set<std::string> known = names(dir("known")), before = names(root->path());
  for (const Wrong& wrong : wrongs) {
    const Ended ended = train(wrong.ranks, wrong.run, wrong.options);
    EXPECT_TRUE(ended.code == 1 || ended.code == 2) << ended.code << ended.error;
    EXPECT_LT(ended.seconds, soon) << ended.error;
    EXPECT_EQ(ended.sentences(), 1) << ended.error;
    if (wrong.sentence == data || wrong.sentence == "run_dir")
      EXPECT_TRUE(ended.first_line().starts_with("onescale: ")) << ended.error;
    else
      EXPECT_EQ(ended.first_line(), "onescale: " + wrong.sentence);
    EXPECT_EQ(names(root->path()), before) << wrong.options;
    EXPECT_EQ(names(dir("known")), known) << wrong.options;
    EXPECT_EQ(names(dir("other")), std::set<std::string>{"file"}) << wrong.options;
  }
}

TEST_F(Training, AWrongCommandLineIsSaidOnceWhateverTheCommand) {
  for (const char* words : {"trainn", "train --bad", "eval --bad 1", "export --model x --out y"}) {
    const Ended ended = run_job(str(MPIRUN " -n 3 " ONESCALE " ", words));
    EXPECT_EQ(ended.code, 2) << words << ended.error;
    EXPECT_EQ(ended.sentences(), 1) << words << ended.error;
  }
}

TEST_F(Training, SaysWhenMpirunKeepsCpusFromIt) {
  const auto bound = [](const char* how) {
    const std::string job = str(MPIRUN " -n 1 --bind-to ", how, " ", command(1, str("bound_", how), "--threads 0"));
    return run_job(job + " --stop_after 1", true).error.find("mpirun has bound its ranks") != std::string::npos;
  };
  if (available_threads() < 2) GTEST_SKIP() << "one CPU";
  EXPECT_TRUE(bound("core"));
  EXPECT_FALSE(bound("none"));
}

TEST_F(Training, ASecondJobInTheSameRunIsRefused) {
  Job job(command(2, "shared", "--steps 100000"));
  wait_for([&] { return !metrics("shared").empty(); });
  const Ended second = train(4, "shared", "--steps 100000");
  EXPECT_EQ(second.code, 1);
  EXPECT_EQ(second.first_line(), "onescale: run_dir " + dir("shared") +
                                     " is in use by another process; wait for it or give another run_dir");
  EXPECT_EQ(second.sentences(), 1) << second.error;
  kill(job.pid(), SIGUSR1);
  EXPECT_EQ(job.wait(), 75);
}

TEST_F(Training, ATraceHasARowForComputingAndOneForWaitingOfEveryRank) {
  for (const int steps : {2, 50}) {  // more than the run has: what there is
    const std::string file = *root / "trace.json";
    ASSERT_EQ(
        train(4, str("traced", steps), str("--tp 2 --zero 3 --stop_after 3 --trace ", file, " --trace_steps ", steps))
            .code,
        75);
    const Json trace = Json::read_file(file);
    std::map<std::pair<std::int64_t, std::int64_t>, int> rows;
    std::map<std::string, int> transfers;  // by phase: begun and ended
    for (std::int64_t i = 0; i < trace.size(); ++i) {
      const Json event = trace.at(i);
      if (event.has("cat")) ++transfers[event.at("ph").string()];
      if (event.at("ph").string() != "X") continue;
      ++rows[{event.at("pid").integer(), event.at("tid").integer()}];
      EXPECT_GE(event.at("ts").number(), 0);
      EXPECT_GE(event.at("dur").number(), 0);
    }
    EXPECT_EQ(rows.size(), 8u);
    EXPECT_GT(transfers["b"], 100);
    EXPECT_EQ(transfers["b"], transfers["e"]);
    for (const auto& [row, count] : rows) EXPECT_GT(count, 100) << row.first << " " << row.second;
  }
}

// One rank of four that may write no byte beyond a file's first kilobytes.
TEST_F(Training, GoesOnWhenOneRankCannotWrite) {
  ASSERT_EQ(train(4, "poor", "--zero 1 --stop_after 5").code, 75);
  const auto before = tensors(checkpoint("poor", 5));
  // Without shared memory, which needs files of its own.
  const std::string poor =
      str(MPIRUN
          " --mca btl self,tcp -n 4 sh -c 'if [ $OMPI_COMM_WORLD_RANK = 2 ]; then ulimit -f 4; fi; "
          "exec ",
          command(1, "poor", "--zero 1 --save_every 2"), "'");
  const Ended ended = run_job(poor);
  EXPECT_EQ(ended.code, 1);
  EXPECT_TRUE(ended.first_line().starts_with("onescale: step 10, the last, could not be saved in ")) << ended.error;
  int failed = 0;
  std::int64_t last = 0;
  for (const Json& line : metrics("poor")) {
    if (line.has("event") && line.at("event").string() == "save_failed") ++failed;
    if (!line.has("event")) last = line.at("step").integer();
  }
  EXPECT_EQ(failed, 3);  // after steps 6, 8 and 10
  EXPECT_EQ(last, 9);
  EXPECT_EQ(names(dir("poor") + "/checkpoints"), std::set<std::string>{"step-00000005"});
  EXPECT_TRUE(tensors(checkpoint("poor", 5)) == before);
  EXPECT_EQ(train(4, "poor", "--zero 1").code, 0);
  expect_close("one", "poor");
}

}  // namespace
}  // namespace onescale

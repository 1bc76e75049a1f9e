// The program as a process: descriptors that are closed, readers that go away, signals. Each command line runs in a
// shell of its own.
#include <cerrno>
#include <cstring>

#include "parallel/file.h"
#include "tests/job.h"
#include "tests/runs.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

class Process : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir = new TempDir;  // NOLINT: lives until TearDownTestSuite
    prepare_documents(*dir);
    std::ofstream(*dir / "base.toml")
        << "data = \"" << *dir / "data"
        << "\"\nn_layer = 1\nn_head = 2\nn_embd = 16\n"
        << "n_positions = 32\nsteps = 6\nglobal_batch = 2\nmicro_batch = 1\nlog_every = 1\n"
        << "eval_every = 3\neval_rows = 2\nsave_every = 3\nwarmup_steps = 1\nthreads = 1\n";
    ASSERT_EQ(run_job(prepare("prepared")).code, 0);
    ASSERT_EQ(run_job(train("whole")).code, 0);
  }
  static void TearDownTestSuite() { delete dir; }

  static std::string at(const std::string& name) { return *dir / name; }
  static std::string train(const std::string& run) {
    return str(ONESCALE " train --config ", at("base.toml"), " --run_dir ", at(run), " ");
  }
  static std::string prepare(const std::string& out) {
    return str(ONESCALE " prepare --input ", at("text"), " --pattern '*.py' --vocab_size 300 --val_share 0.1 --out ",
               at(out), " ");
  }
  static std::string generate() {
    return ONESCALE " generate --prompt def --max_new_tokens 1000000 --model " + at("whole") + " ";
  }
  static void expect_same_run(const std::string& run) {
    const std::vector<Json> a = read_metrics(at("whole")), b = read_metrics(at(run));
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(timeless(a[i]), timeless(b[i]));
    const std::string file = "/checkpoints/step-00000006/model.safetensors";
    EXPECT_EQ(read_text(at("whole") + file), read_text(at(run) + file));
    std::ifstream log(at(run) + "/log.txt");  // "2026-01-31 12:34:56  ..."
    for (std::string line; std::getline(log, line);) {
      if (!line.empty() && line[0] != ' ') {
        EXPECT_TRUE(line.starts_with("20") && line.substr(10, 1) == " ") << line;
      }
    }
  }
  static void expect_same_data(const std::string& out) {
    for (const std::string& name : names(at("prepared")))
      EXPECT_EQ(read_text(at("prepared/" + name)), read_text(at(str(out, "/", name)))) << name;
  }

  static TempDir* dir;
};
TempDir* Process::dir = nullptr;

TEST_F(Process, WritesNothingIntoFilesThatTookAClosedDescriptor) {
  EXPECT_EQ(run_job("{ " + prepare("closed_data") + " >&-; }").code, 0);
  expect_same_data("closed_data");
  EXPECT_EQ(run_job("{ " + train("closed") + " <&- >&- 2>&-; }").code, 0);
  expect_same_run("closed");
}

// Where the result is in files the program goes on; where it is what is printed, that it was not is a failure.
TEST_F(Process, GoesOnWithoutAReaderWhereItsResultIsInFiles) {
  const auto code = [](const std::string& command, const std::string& reader) {
    run_job(str("{ ", command, "; echo $? > ", at("code"), "; } | ", reader));
    return read_text(at("code"));
  };
  EXPECT_EQ(code(prepare("unread_data"), "true"), "0\n");
  expect_same_data("unread_data");
  EXPECT_EQ(code(train("unread"), "head -1"), "0\n");
  expect_same_run("unread");
  EXPECT_EQ(code(generate(), "head -c 1"), "1\n");
  EXPECT_EQ(code(ONESCALE " eval --model " + at("whole") + " --data " + at("data"), "true"), "1\n");
  for (const std::string& command : {generate(), str(ONESCALE " plan --n_layer 1 "), str(ONESCALE " --help ")}) {
    for (const char* output : {">/dev/full", ">&-"}) {
      const Ended ended = run_job(str("{ ", command, output, "; }"), true);
      EXPECT_EQ(ended.code, 1) << command;
      EXPECT_EQ(ended.error, "onescale: standard output cannot be written; its reader is gone or the disk full\n");
    }
  }
}

TEST_F(Process, SavesWhenItsTerminalGoes) {
  const auto hang_up_once = [](const std::string& there, const std::string& command) {
    return run_job(
        str("{ ", command, "& job=$!; until test -e ", there, "; do sleep 0.02; done; kill -HUP $job; wait $job; }"));
  };
  const Ended ended = hang_up_once(at("hung_up/metrics.jsonl"), train("hung_up") + "--steps 1000000 ");
  EXPECT_EQ(ended.code, 75) << ended.error;
  EXPECT_FALSE(names(at("hung_up/checkpoints")).empty());
  const std::string large = at("large.txt");
  {
    std::ofstream file(large);
    for (std::int64_t i = 0; i < 400'000; ++i) file << i * 7919 % 100'003 << " word" << i % 977 << "\n";
  }
  const Ended cut = hang_up_once(at("cut.partial-*"), str(prepare("cut"), "--input ", large, " "));
  EXPECT_EQ(cut.code, 1);
  EXPECT_EQ(cut.first_line(), "onescale: stopped by a signal; nothing is kept of " + at("cut"));
  for (const std::string& name : names(dir->path())) EXPECT_FALSE(name.starts_with("cut")) << name;
}

// What Lustre and NFS mounted without locks answer; a lock that another holds is EWOULDBLOCK.
TEST_F(Process, GoesOnWithAWarningWhereTheFileSystemHasNoLocks) {
  const auto with = [](int error, const std::string& run) {
    return run_job(str("ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 FLOCK_ERRNO=", error,
                       " LD_PRELOAD=" NO_FLOCK " ", train(run)),
                   true);
  };
  for (const int error : {ENOLCK, ENOSYS, EOPNOTSUPP}) {
    const std::string run = str("unlocked", error);
    const Ended ended = with(error, run);
    EXPECT_EQ(ended.code, 0) << ended.error;
    EXPECT_EQ(ended.first_line(), str("run_dir ", at(run), " is not locked (", std::strerror(error),
                                      "): see to it that no other process uses it"));
    expect_same_run(run);
  }
  const Ended ended = with(EWOULDBLOCK, "locked");
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.error.find("is in use by another process"), std::string::npos) << ended.error;
}

}  // namespace
}  // namespace onescale

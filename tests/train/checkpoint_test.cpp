#include "train/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "model/parameters.h"
#include "parallel/file.h"
#include "tests/temp_dir.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

ModelConfig small() {
  ModelConfig c{.vocab_size = 17, .n_positions = 5, .n_embd = 12, .n_layer = 2, .n_head = 3, .n_inner = 7};
  c.bos_token_id = c.eos_token_id = 0;
  return c;
}

// Element i of parameter p of one of the three kinds at a step: a value of its own.
float value(std::int64_t step, int kind, std::size_t p, std::int64_t i) {
  return static_cast<float>(step) + static_cast<float>(kind) * 0.25f + static_cast<float>(p) * 1e-3f +
         static_cast<float>(i) * 1e-5f;
}

Communicator& world() {
  static const std::unique_ptr<Communicator> alone = make_single_communicator("world");
  return *alone;
}

constexpr const char* kinds[] = {"", "exp_avg.", "exp_avg_sq."};

struct Example {
  ModelConfig config = small();
  ParameterTable table = gpt_bigcode_table(config);

  Gather fetch(std::int64_t step, int kind) const {
    return [this, step, kind](const std::vector<std::int64_t>& wanted, float* out) {
      const auto p = static_cast<std::size_t>(wanted[0]);
      for (std::int64_t i = 0; i < table.parameters[p].numel(); ++i) out[i] = value(step, kind, p, i);
    };
  }
  CheckpointContents contents(std::int64_t step, bool adam = true) const {
    CheckpointContents c{{}, config, fetch(step, 0), {}, std::string("sp\0model", 8)};
    if (adam) c.moments = {fetch(step, 1), fetch(step, 2)};
    c.state.step = step;
    c.state.samples = std::int64_t{1} << 40;
    c.state.bad_steps = 1;
    c.state.skipped_steps = 2;
    c.state.clipped_steps = 3;
    c.state.seconds = 1234.5678901234567;
    c.state.options = {{"lr", "0.001"}, {"data", "a \"b\"\n"}};
    return c;
  }
  void expect_equal(const Checkpoint& found, std::int64_t step, bool adam = true) const {
    EXPECT_EQ(found.state().step, step);
    for (std::size_t p = 0; p < table.parameters.size(); ++p) {
      const std::int64_t n = table.parameters[p].numel();
      std::vector<float> out(static_cast<std::size_t>(n));
      for (int kind = 0; kind < (adam ? 3 : 1); ++kind) {
        found.values(kinds[kind])(p, 0, n, out.data());
        for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(out[static_cast<std::size_t>(i)], value(step, kind, p, i));
      }
    }
  }
};

TEST(Checkpoint, EverythingComesBack) {
  const Example run;
  for (bool adam : {true, false}) {
    const TempDir dir;
    const std::string path = save_checkpoint(dir.path(), run.contents(12, adam), world());
    EXPECT_EQ(path, dir / "checkpoints/step-00000012");
    const FoundCheckpoint found = find_checkpoint(dir.path(), world());
    ASSERT_TRUE(found.checkpoint.has_value());
    EXPECT_TRUE(found.warnings.empty());
    run.expect_equal(*found.checkpoint, 12, adam);
    EXPECT_EQ(found.checkpoint->has_moments(), adam);
    EXPECT_EQ(found.checkpoint->path(), path);
    EXPECT_EQ(read_text(path + "/tokenizer.model"), std::string("sp\0model", 8));
    const TrainerState &a = found.checkpoint->state(), b = run.contents(12).state;
    EXPECT_EQ(a.samples, b.samples);
    EXPECT_EQ(a.bad_steps, b.bad_steps);
    EXPECT_EQ(a.skipped_steps, b.skipped_steps);
    EXPECT_EQ(a.clipped_steps, b.clipped_steps);
    EXPECT_EQ(a.seconds, b.seconds);
    EXPECT_EQ(a.options, b.options);
    // A shard's range.
    float out[2];
    found.checkpoint->values("")(0, 100, 2, out);
    EXPECT_EQ(out[1], value(12, 0, 0, 101));
    if (!adam) {
      EXPECT_NE(sentence([&] { found.checkpoint->values("exp_avg."); }).find("no optimizer state"), std::string::npos);
    }
    // What lies there is a Hugging Face directory.
    EXPECT_TRUE(fs::exists(path + "/config.json") && fs::exists(path + "/model.safetensors"));
    EXPECT_EQ(names(dir / "checkpoints"), std::set<std::string>{"step-00000012"});
  }
}

TEST(Checkpoint, NoneYetIsNoError) {
  const TempDir dir;
  EXPECT_FALSE(find_checkpoint(dir.path(), world()).checkpoint.has_value());
  fs::create_directories(dir / "checkpoints/.tmp-step-00000003");
  fs::create_directories(dir / "checkpoints/other");
  EXPECT_FALSE(find_checkpoint(dir.path(), world()).checkpoint.has_value());
}

TEST(Checkpoint, PruningKeepsTheNewestAndEveryMth) {
  const Example run;
  const TempDir dir;
  fs::create_directories(dir / "checkpoints/.tmp-step-00000001/left");
  for (std::int64_t step : {10, 20, 25, 30, 40, 50}) {
    save_checkpoint(dir.path(), run.contents(step), world());
    EXPECT_TRUE(prune_checkpoints(dir.path(), step, 2, 25).empty());
  }
  EXPECT_EQ(names(dir / "checkpoints"), (std::set<std::string>{"step-00000025", "step-00000040", "step-00000050"}));
  // A run taken back to step 25 saves 30: what lies ahead stays, and what it has just saved is never removed.
  save_checkpoint(dir.path(), run.contents(30), world());
  EXPECT_TRUE(prune_checkpoints(dir.path(), 30, 0, 0).empty());
  EXPECT_EQ(names(dir / "checkpoints"), (std::set<std::string>{"step-00000030", "step-00000040", "step-00000050"}));
}

TEST(Checkpoint, TheSameStepIsReplaced) {
  const Example run;
  const TempDir dir;
  const std::string path = save_checkpoint(dir.path(), run.contents(3, true), world());
  save_checkpoint(dir.path(), run.contents(3, false), world());
  EXPECT_FALSE(Checkpoint(path).has_moments());
  EXPECT_EQ(names(dir / "checkpoints"), std::set<std::string>{"step-00000003"});
}

// Whatever happens to the newest one, the older one is used, and one sentence names the file and, where it is one, the
// tensor.
TEST(Checkpoint, ADamagedOneNeverCostsTheOlder) {
  const Example run;
  const TempDir dir;
  save_checkpoint(dir.path(), run.contents(1), world());
  const std::string path = save_checkpoint(dir.path(), run.contents(2), world());
  auto expect_older = [&](const std::string& what, const std::string& file) {
    const FoundCheckpoint found = find_checkpoint(dir.path(), world());
    ASSERT_TRUE(found.checkpoint.has_value()) << what;
    run.expect_equal(*found.checkpoint, 1);
    ASSERT_EQ(found.warnings.size(), 1u);
    EXPECT_NE(found.warnings[0].find("step-00000002"), std::string::npos) << found.warnings[0];
    EXPECT_NE(found.warnings[0].find(file), std::string::npos) << found.warnings[0];
    EXPECT_NE(found.warnings[0].find("step-00000001 is used instead"), std::string::npos) << found.warnings[0];
    EXPECT_EQ(found.warnings[0].find('\n'), std::string::npos);
  };
  for (const std::string& name : names(path)) {
    const std::string file = str(path, "/", name), whole = read_text(file);
    fs::remove(file);
    expect_older("missing", name);
    for (std::size_t size : {std::size_t{0}, std::size_t{7}, whole.size() / 2, whole.size() - 2}) {
      std::ofstream(file, std::ios::binary) << whole.substr(0, size);
      expect_older("truncated", name);
    }
    std::ofstream(file, std::ios::binary) << whole << '\0';
    expect_older("longer", name);
    for (std::size_t at = 0; at < whole.size(); at += whole.size() / 7 + 1) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ 4);
      std::ofstream(file, std::ios::binary) << flipped;
      // White space of trainer.json and the header's metadata may change without any effect.
      const FoundCheckpoint found = find_checkpoint(dir.path(), world());
      ASSERT_TRUE(found.checkpoint.has_value());
      if (found.checkpoint->state().step == 1)
        expect_older("flipped", name);
      else
        run.expect_equal(*found.checkpoint, 2);
    }
    std::ofstream(file, std::ios::binary) << whole;
  }
  // A flipped bit of the data names its tensor.
  const SafetensorsReader optimizer(path + "/optimizer.safetensors");
  const StoredTensor& tensor = optimizer.at("exp_avg_sq.transformer.h.1.mlp.c_fc.weight");
  std::string text = read_text(path + "/optimizer.safetensors");
  text[static_cast<std::size_t>(tensor.offset) + 5] ^= 1;
  std::ofstream(path + "/optimizer.safetensors", std::ios::binary) << text;
  expect_older("flipped", "optimizer.safetensors: tensor exp_avg_sq.transformer.h.1.mlp.c_fc.weight has the checksum");
  EXPECT_THROW(Checkpoint(path).verify(), DamagedFile);
  // Ranks that share the work find it too, one of them.
  int found = 0;
  for (int part = 0; part < 3; ++part) found += sentence([&] { Checkpoint(path).verify(part, 3); }).empty() ? 0 : 1;
  EXPECT_EQ(found, 1);
  // Training on from step 1 saves step 2 anew.
  save_checkpoint(dir.path(), run.contents(2), world());
  run.expect_equal(*find_checkpoint(dir.path(), world()).checkpoint, 2);
  // When nothing is left, starting afresh silently would be a loss.
  fs::remove(path + "/config.json");
  fs::remove(dir / "checkpoints/step-00000001/trainer.json");
  const std::string said = sentence([&] { find_checkpoint(dir.path(), world()); });
  EXPECT_NE(said.find("none of its 2 checkpoints can be used"), std::string::npos) << said;
}

// What the system does not read now may be whole: going back would lose it without need.
TEST(Checkpoint, AnUnreadableOneIsAnError) {
  const Example run;
  const TempDir dir;
  save_checkpoint(dir.path(), run.contents(1), world());
  const std::string path = save_checkpoint(dir.path(), run.contents(2), world());
  fs::remove(path + "/model.safetensors");
  fs::create_symlink("model.safetensors", path + "/model.safetensors");  // a loop, which even root cannot open
  const std::string said = sentence([&] { find_checkpoint(dir.path(), world()); });
  EXPECT_NE(said.find("model.safetensors: cannot be opened"), std::string::npos) << said;
}

TEST(Checkpoint, AFailedSaveLeavesTheOlderAndNothingElse) {
  const Example run;
  const TempDir dir;
  save_checkpoint(dir.path(), run.contents(1), world());
  CheckpointContents broken = run.contents(2);
  broken.moments[1] = [](const std::vector<std::int64_t>& wanted, float*) {
    check(wanted[0] < 20, "a fault in the middle");
  };
  EXPECT_EQ(sentence([&] { save_checkpoint(dir.path(), broken, world()); }), "a fault in the middle");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit tiny{3000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &tiny);
  const std::string said = sentence([&] { save_checkpoint(dir.path(), run.contents(2), world()); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(said.find("cannot write"), std::string::npos) << said;
  EXPECT_EQ(names(dir / "checkpoints"), std::set<std::string>{"step-00000001"});
  run.expect_equal(*find_checkpoint(dir.path(), world()).checkpoint, 1);
  std::ofstream(dir / "file") << "x";
  EXPECT_NE(sentence([&] { save_checkpoint(dir / "file", run.contents(1), world()); }).find("cannot be saved"),
            std::string::npos);
}

// A file system of 2 MB, where the process may mount one.
TEST(Checkpoint, NoSpaceIsFoundBeforeAndWhileWriting) {
  Example run;
  const TempDir dir;
  if (mount("onescale_test", dir.path().c_str(), "tmpfs", 0, "size=2m") != 0)
    GTEST_SKIP() << "no right to mount a tmpfs";
  save_checkpoint(dir.path(), run.contents(1), world());
  run.config.n_positions = 20000;  // 3 x 0.96 MB
  run.table = gpt_bigcode_table(run.config);
  std::string said = sentence([&] { save_checkpoint(dir.path(), run.contents(2), world()); });
  EXPECT_NE(said.find("MB are free, but the checkpoint of step 2 needs"), std::string::npos) << said;
  EXPECT_EQ(names(dir / "checkpoints"), std::set<std::string>{"step-00000001"});
  // The space goes while the checkpoint is written.
  run = Example();
  CheckpointContents contents = run.contents(2);
  contents.moments[0] = [&](const std::vector<std::int64_t>& wanted, float* out) {
    if (wanted[0] == 0) std::ofstream(dir / "filler") << std::string(2000000, 'x');
    run.fetch(2, 1)(wanted, out);
  };
  said = sentence([&] { save_checkpoint(dir.path(), contents, world()); });
  EXPECT_NE(said.find("No space left"), std::string::npos) << said;
  EXPECT_EQ(names(dir / "checkpoints"), std::set<std::string>{"step-00000001"});
  fs::remove(dir / "filler");
  run.expect_equal(*find_checkpoint(dir.path(), world()).checkpoint, 1);
  umount2(dir.path().c_str(), MNT_DETACH);
}

// Runs `work` in a child that is killed before its n-th system call: what it leaves on the disk changes at no other
// moment, and no clock decides which moments are tried. Neither killed nor well: it may not be traced, or it failed.
struct Ending {
  bool killed, well;
};
Ending kill_before_call(int n, const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
    raise(SIGSTOP);
    try {
      work();
    } catch (...) {
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  for (int stops = 0; waitpid(child, &status, 0) == child && WIFSTOPPED(status); ++stops)  // at entry and exit of each
    stops < 2 * n ? ptrace(PTRACE_SYSCALL, child, nullptr, nullptr) : kill(child, SIGKILL);
  return {WIFSIGNALED(status), WIFEXITED(status) && WEXITSTATUS(status) == 0};
}

TEST(Checkpoint, AKillAtAnyMomentLeavesTheNewestComplete) {
  const Example run;
  const TempDir dir;
  save_checkpoint(dir.path(), run.contents(1), world());
  std::int64_t last = 1;
  for (int n = 1;; n += 5) {
    const Ending ending = kill_before_call(n, [&] {
      save_checkpoint(dir.path(), run.contents(last), world());  // replaces what is there
      save_checkpoint(dir.path(), run.contents(last + 1), world());
      prune_checkpoints(dir.path(), last + 1, 1, 0);
    });
    if (n == 1 && !ending.killed) GTEST_SKIP() << "no right to trace a child";
    const FoundCheckpoint found = find_checkpoint(dir.path(), world());
    EXPECT_TRUE(found.warnings.empty());
    ASSERT_TRUE(found.checkpoint.has_value());
    ASSERT_GE(found.checkpoint->state().step, last);
    last = found.checkpoint->state().step;
    run.expect_equal(*found.checkpoint, last);
    if (ending.killed) continue;
    EXPECT_TRUE(ending.well);
    break;
  }
  EXPECT_GT(last, 5);
}

}  // namespace
}  // namespace onescale

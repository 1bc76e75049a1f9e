#include "train/metrics.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "parallel/file.h"
#include "tests/temp_dir.h"

namespace onescale {
namespace {

class MetricsTest : public testing::Test {
 protected:
  void append(const std::string& text) const { std::ofstream(dir_ / "metrics.jsonl", std::ios::app) << text; }
  void write_steps(std::int64_t first, std::int64_t last) const {
    MetricsFile file(dir_.path(), first);
    for (std::int64_t step = first; step < last; ++step) {
      Json line = Json::object();
      line.set("step", step);
      line.set("loss", 1.0 / static_cast<double>(step + 3));
      file.write(line);
    }
  }

  const TempDir dir_;
};

TEST_F(MetricsTest, ResumedFileIsAsIfNeverInterrupted) {
  write_steps(0, 10);
  const std::string whole = read_text(dir_ / "metrics.jsonl");
  EXPECT_EQ(std::count(whole.begin(), whole.end(), '\n'), 10);
  std::filesystem::remove(dir_ / "metrics.jsonl");

  write_steps(0, 7);           // killed two steps after the checkpoint of step 5
  append("{\"step\":7,\"lo");  // while it wrote a line
  write_steps(5, 10);
  EXPECT_EQ(read_text(dir_ / "metrics.jsonl"), whole);
  for (const auto& entry : std::filesystem::directory_iterator(dir_.path()))
    EXPECT_EQ(entry.path().filename(), "metrics.jsonl");
}

TEST_F(MetricsTest, DropsALastLineWithoutAnEnd) {
  write_steps(0, 3);
  const std::string whole = read_text(dir_ / "metrics.jsonl");
  append("{\"step\":1}");  // of an earlier step and complete JSON, but its newline is missing
  write_steps(3, 3);
  EXPECT_EQ(read_text(dir_ / "metrics.jsonl"), whole);
}

TEST_F(MetricsTest, LinesAreWrittenThroughAtOnce) {
  MetricsFile file(dir_.path(), 0);
  Json line = Json::object();
  line.set("step", 0);
  file.write(line);
  EXPECT_EQ(read_text(dir_ / "metrics.jsonl"), "{\"step\":0}\n");
}

TEST_F(MetricsTest, NamesFileAndLineOfWhatIsNotJson) {
  append("{\"step\":0}\nhello\n");
  try {
    const MetricsFile file(dir_.path(), 5);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(dir_ / "metrics.jsonl:2"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("remove this line"), std::string::npos) << e.what();
  }
  EXPECT_THROW(MetricsFile(dir_ / "none", 0), Error);
}

TEST(Progress, Text) {
  EXPECT_EQ(duration_text(0.2), "0s");
  EXPECT_EQ(duration_text(59.4), "59s");
  EXPECT_EQ(duration_text(65), "1m 05s");
  EXPECT_EQ(duration_text(7384), "2h 03m");
  Progress progress{.step = 120, .steps = 2000, .loss = 3.21449, .grad_norm = 0.84, .lr = 3e-4, .tokens_per_s = 12345};
  progress.seconds_left = 65;
  EXPECT_EQ(progress_text(progress), "step 120/2000  loss 3.2145  norm 0.840  lr 3.00e-04  12.3k tok/s  1m 05s left");
  progress.mfu = 0.412;
  progress.tokens_per_s = 2'340'000;
  EXPECT_EQ(progress_text(progress),
            "step 120/2000  loss 3.2145  norm 0.840  lr 3.00e-04  2.34M tok/s  mfu 41.2%  1m 05s left");
}

TEST_F(MetricsTest, LogKeepsLinesAndShowsProgressInPlaceOnATerminalAlone) {
  const auto show = [&](bool terminal) {
    std::FILE* out = std::fopen((dir_ / "out").c_str(), "wb");
    {
      Log log(terminal ? dir_.path() : "", terminal, out);
      for (std::int64_t step = 1; step <= 5; ++step)
        log.progress(progress_text({.step = step, .steps = 5}), step % 2 == 0 || step == 5);
      log.line("done");
    }
    std::fclose(out);
    return read_text(dir_ / "out");
  };
  const std::string plain = show(false), terminal = show(true);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), '\n'), 4);  // steps 2, 4, the last one, and "done"
  EXPECT_EQ(plain.find('\r'), std::string::npos);
  EXPECT_EQ(std::count(terminal.begin(), terminal.end(), '\n'), 1);
  EXPECT_EQ(std::count(terminal.begin(), terminal.end(), '\r'), 6);  // five steps, then the line is erased for "done"
  const std::string log = read_text(dir_ / "log.txt");
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 4);
  EXPECT_NE(log.find("  done\n"), std::string::npos);
}

TEST_F(MetricsTest, TellsWhatIsThere) {
  append(
      "{\"step\":4,\"event\":\"eval\",\"loss\":2.5}\n{\"step\":5,\"loss\":1}\n"
      "{\"step\":6,\"event\":\"eval\",\"loss\":null}\n{\"step\":6,\"event\":\"sample\",\"text\":\"a\"}\n"
      "{\"step\":7,\"event\":\"sample\",\"text\":\"cut o");
  const auto has = [&](std::int64_t step, const char* event) { return has_event(dir_.path(), step, event); };
  EXPECT_TRUE(has(4, "eval"));
  EXPECT_FALSE(has(5, "eval"));
  EXPECT_FALSE(has(6, "eval"));  // no number: not made
  EXPECT_TRUE(has(6, "sample"));
  EXPECT_FALSE(has(7, "sample"));
  EXPECT_FALSE(has_event(dir_ / "none", 4, "eval"));
}

TEST_F(MetricsTest, ALogOnAFullDiskEndsNothing) {
  std::filesystem::create_symlink("/dev/full", dir_ / "log.txt");
  std::FILE* out = std::fopen((dir_ / "out").c_str(), "wb");
  Log log(dir_.path(), false, out);
  log.line("a");
  log.line("b");
  std::fclose(out);
  EXPECT_EQ(
      read_text(dir_ / "out"),
      "a\n" + (dir_ / "log.txt") + ": cannot be written (No space left on device); its lines are here alone\nb\n");
}

}  // namespace
}  // namespace onescale

#include "train/verify.h"

#include <cstdio>
#include <fstream>

#include "tests/job.h"
#include "tests/temp_dir.h"
#include "tests/train/golden.h"
#include "train/commands.h"

namespace onescale {
namespace {

// The gradients that transformers found for a model, with a fault, and what verify says of them.
struct Other {
  explicit Other(const std::string& name) : golden(name) {
    for (const Parameter& p : golden.source.table().parameters) {
      const std::vector<double> values = golden.values("grad." + p.name);
      gradient.emplace_back(values.begin(), values.end());
    }
    norm = golden.values("grad_norm")[0];
    options.model = golden.dir;
    options.batch = golden.dir + "/batch.safetensors";
    options.against = scratch / "other.safetensors";
  }
  void scale(double factor) {
    for (std::vector<float>& g : gradient)
      for (float& x : g) x = static_cast<float>(x * factor);
    norm *= factor;
  }
  // The file of another trainer; names with or without "grad.transformer.".
  void write(bool prefix = true) const {
    const ParameterTable& table = golden.source.table();
    std::vector<StoredTensor> tensors = {{"grad_norm", FileType::F64, {1}}};
    for (const Parameter& p : table.parameters)
      tensors.push_back({prefix ? "grad." + p.name : p.name.substr(12), FileType::F32, p.shape});
    SafetensorsWriter writer(options.against, tensors);
    writer.write_bytes(&norm, sizeof norm);
    for (const std::vector<float>& g : gradient) writer.write(g.data(), static_cast<std::int64_t>(g.size()));
    writer.close();
  }
  // {exit code, what is printed}.
  std::pair<int, std::string> verify(bool prefix = true) const {
    write(prefix);
    World world;
    testing::internal::CaptureStdout();
    const int code = verify_command(options, world);
    std::fflush(stdout);
    return {code, testing::internal::GetCapturedStdout()};
  }

  TempDir scratch;
  Golden golden;
  Options options;
  WholeTensors gradient;
  double norm;
};

int count(const std::string& text, const std::string& word) {
  int n = 0;
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

TEST(VerifyAgainst, AgreesWithTransformers) {
  for (const char* name : {"mqa", "mha", "wide_mqa"}) {
    for (const bool prefix : {true, false}) {
      const auto [code, text] = Other(name).verify(prefix);
      EXPECT_EQ(code, 0) << text;
      EXPECT_EQ(count(text, "agrees"), 7) << text;  // six groups and the norm
    }
  }
}

TEST(VerifyAgainst, NamesAFactor) {
  const std::vector<std::pair<double, std::string>> cases = {{2, "2 times too large"},
                                                             {0.25, "4 times too small"},
                                                             {65, "a sum over the 65 good tokens"},  // of this batch
                                                             {65.0 / 128, "divided by all 128 tokens"},
                                                             {65.0 / 4, "a sum over 65 good tokens, averaged over 4"},
                                                             {1 / 7.339369808, "already clipped to a norm of 1"}};
  for (const auto& [factor, cause] : cases) {
    Other other("wide_mqa");
    other.scale(factor);
    const auto [code, text] = other.verify();
    EXPECT_EQ(code, 1) << text;
    EXPECT_EQ(count(text, cause), 6) << text;
    EXPECT_EQ(count(text, "the gradients' own factor"), 1) << text;
  }
}

TEST(VerifyAgainst, NamesUnsummedKeyAndValueRows) {
  Other other("wide_mqa");
  const Part kv = parameter_groups(other.golden.source.config())[2];
  for (const Part::Range& range : kv.ranges)
    for (auto e = range.begin; e < range.end; ++e) other.gradient[range.parameter][static_cast<std::size_t>(e)] /= 2;
  const auto [code, text] = other.verify();
  EXPECT_EQ(code, 1);
  EXPECT_EQ(count(text, "agrees"), 6) << text;  // the norm was left right
  EXPECT_EQ(count(text, "not summed over tp: one rank's part (about 1 / tp = 1 / 2)"), 1) << text;
}

TEST(VerifyAgainst, NamesANormThatCountsReplicasTwice) {
  Other other("wide_mqa");
  const double kv = likeness(parameter_groups(other.golden.source.config())[2], other.gradient, other.gradient).norm;
  other.norm = std::sqrt(other.norm * other.norm + kv * kv);
  const auto [code, text] = other.verify();
  EXPECT_EQ(code, 1);
  EXPECT_EQ(count(text, "K/V rows are counted on each of 2 tp ranks"), 1) << text;
}

// What averages the means of two shards is the mean of two gradients, each of the loss over one shard's good tokens.
TEST(VerifyAgainst, NamesPerShardMeansAndLostTargets) {
  Other other("wide_mqa");
  const ModelSource& source = other.golden.source;
  const VerifyCase c = model_case(other.options, source, read_batch(other.options.batch, source.config()));
  const auto gradient = [&](auto keep) {
    World world;
    return measure_alone(world.communicator(), masked(c, c.batch.rows, [&](auto, auto t) { return keep(t); })).gradient;
  };
  const std::int64_t half = c.batch.seq_len / 2;
  const WholeTensors first = gradient([=](std::int64_t t) { return t < half; });
  const WholeTensors second = gradient([=](std::int64_t t) { return t >= half; });
  for (std::size_t i = 0; i < first.size(); ++i)
    for (std::size_t e = 0; e < first[i].size(); ++e) other.gradient[i][e] = (first[i][e] + second[i][e]) / 2;
  EXPECT_EQ(count(other.verify().second, "mean of 2 per-shard means"), 6);
  other.gradient = gradient([=](std::int64_t t) { return t != half - 1; });
  EXPECT_EQ(count(other.verify().second, "labels shifted inside each of 2 shards"), 6);
}

TEST(VerifyAgainst, NamesWhatIsAbsent) {
  Other other("mqa");
  other.options.against = other.golden.dir + "/batch.safetensors";
  World world;
  EXPECT_NE(sentence([&] { verify_command(other.options, world); }).find("holds no gradient"), std::string::npos);
  other.options.batch = "";
  EXPECT_THROW(verify_command(other.options, world), UsageError);
}

// (2, 0) against (1, 1): half of <g, ref> / <ref, ref> = 2 / 2, and what is left over is (1, -1).
TEST(Likeness, IsTheClosedForm) {
  const Part part{"", {{0, 0, 2}}};
  const Likeness l = likeness(part, {{2, 0}}, {{1, 1}});
  EXPECT_DOUBLE_EQ(l.ratio, 1);
  EXPECT_DOUBLE_EQ(l.residual, 1);
  EXPECT_DOUBLE_EQ(l.norm, std::sqrt(2));
  EXPECT_DOUBLE_EQ(likeness(part, {{3, 3}}, {{1, 1}}).residual, 0);
  EXPECT_TRUE(std::isinf(likeness(part, {{1, 0}}, {{0, 0}}).ratio));
  EXPECT_TRUE(std::isnan(likeness(part, {{0, 0}}, {{0, 0}}).ratio));
  EXPECT_EQ(likeness(part, {{0, 0}}, {{0, 0}}).residual, 0);
}

TEST(ParameterGroups, CoverEveryElementOnce) {
  for (const bool multi_query : {true, false}) {
    const ModelConfig config = small_case({}, 1, multi_query, false).config;
    std::int64_t elements = 0, kv = 0;
    for (const Part& group : parameter_groups(config)) {
      for (const Part::Range& range : group.ranges) {
        elements += range.end - range.begin;
        if (group.name == "c_attn K/V rows") kv += range.end - range.begin;
      }
    }
    EXPECT_EQ(elements, config.parameters());
    EXPECT_EQ(kv, config.n_layer * 2 * config.kv_heads() * config.head_size() * (config.n_embd + 1));
  }
}

TEST(VerifyModel, IsCutToTheMemory) {
  const Golden golden("mqa");
  World world;
  VerifyCase c = model_case({}, golden.source, small_case({}, 1).batch);
  cut_to_memory(c, golden.source, std::int64_t{1} << 40);
  EXPECT_EQ(c.config.n_layer, golden.source.config().n_layer);
  cut_to_memory(c, golden.source, 0);
  EXPECT_EQ(c.config.n_layer, 1);
  EXPECT_LE(c.config.vocab_size, 64);
  EXPECT_GT(measure_alone(world.communicator(), c).result.grad_norm, 0);
}

TEST(VerifyCommand, AloneShowsWhatItCanAndSaysHowToSeeTheRest) {
  World world;
  testing::internal::CaptureStdout();
  const int code = verify_command({}, world);
  std::fflush(stdout);
  const std::string text = testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, 0) << text;
  EXPECT_EQ(count(text, "all figures are right"), 1) << text;
  EXPECT_GE(count(text, "needs 2 ranks"), 10) << text;
  EXPECT_GE(count(text, "mpirun -n 4 onescale verify"), 2) << text;
}

// Rounding on the wire is asked for, so it is no fault.
TEST(VerifyCommandSlow, KnowsReduceDtype) {
  const TempDir dir;
  std::ofstream(dir / "c.toml") << "reduce_dtype = \"bfloat16\"\n";
  const auto [code, seconds, text] = run_job(MPIRUN " -n 2 " ONESCALE " verify --config " + dir / "c.toml", true);
  EXPECT_EQ(code, 0) << text;
  EXPECT_EQ(count(text, "all figures are right"), 1) << text;
}

TEST(VerifyAgainst, KnowsReduceDtype) {
  Other other("wide_mqa");
  const std::string job = MPIRUN " -n 2 " ONESCALE " verify --reduce_dtype bfloat16 --model " + other.options.model +
                          " --batch " + other.options.batch + " --against " + other.options.against;
  other.write();
  const auto [code, seconds, text] = run_job(job, true);
  EXPECT_EQ(code, 0) << text;
  EXPECT_EQ(count(text, "agrees"), 7) << text;
  other.scale(1.02);  // more than any rounding to 8 bits
  other.write();
  const Ended wrong = run_job(job, true);
  EXPECT_EQ(wrong.code, 1) << wrong.error;
  EXPECT_EQ(count(wrong.error, "agrees"), 0) << wrong.error;
  EXPECT_EQ(count(wrong.error, "the gradients' own factor"), 1) << wrong.error;
}

TEST(VerifyModel, ABatchWithoutTargetsProvesNothing) {
  const Golden golden("mqa");
  HostBatch batch = read_batch(golden.dir + "/batch.safetensors", golden.source.config());
  std::ranges::fill(batch.labels, -100);
  EXPECT_NE(sentence<UsageError>([&] { model_case({}, golden.source, batch); }).find("every label"), std::string::npos);
}

TEST(VerifyCommand, ShowsEveryRowOnFourRanks) {
  const auto [code, seconds, text] = run_job(MPIRUN " -n 4 " ONESCALE " verify", true);
  EXPECT_EQ(code, 0) << text;
  EXPECT_EQ(count(text, "all figures are right"), 1) << text;
  EXPECT_EQ(count(text, "needs"), 0) << text;
  EXPECT_EQ(count(text, "sp=1 1.0000  sp=2 1.0000  sp=4 1.0000"), 12) << text;  // 4 stages, 3 reductions
  EXPECT_EQ(count(text, "13.0000 (0.076923)"), 9) << text;                      // 3 layouts, 3 reductions
}

}  // namespace
}  // namespace onescale

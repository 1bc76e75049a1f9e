#include "train/step.h"

#include <fstream>

#include "parallel/json.h"
#include "tests/train/golden.h"
#include "train/evaluate.h"
#include "train/schedule.h"

namespace onescale {
namespace {

struct Trial {
  Trial(const Golden& golden, const StepSettings& settings) : Trial(golden, settings, golden.source.config()) {}
  Trial(const Golden& golden, const StepSettings& settings, const ModelConfig& config)
      : device(make_cpu_device(2, false, test_isa())),
        weights(*device, *mesh, config, settings.zero),
        step(weights, settings) {
    weights.load(golden.source.fetch());
  }
  std::vector<float> read(std::size_t i, const Assembly::Source& source) {
    std::vector<float> whole(static_cast<std::size_t>(weights.table().parameters[i].numel()));
    weights.assembly().gather({static_cast<std::int64_t>(i)}, source, whole.data());
    return whole;
  }
  std::vector<float> gradient(std::size_t i) { return read(i, step.gradient_source()); }
  std::vector<float> weight(std::size_t i) { return read(i, weights.source()); }
  std::vector<std::vector<float>> gradients() {
    std::vector<std::vector<float>> all;
    for (std::size_t i = 0; i < weights.table().parameters.size(); ++i) all.push_back(gradient(i));
    return all;
  }
  std::unique_ptr<Mesh> mesh = Mesh::single();
  std::unique_ptr<Device> device;
  ModelWeights weights;
  Step step;
};

HostBatch batch_of(const Golden& golden) {
  return read_batch(golden.dir + "/batch.safetensors", golden.source.config());
}

class GradientsGolden : public testing::TestWithParam<std::tuple<const char*, Recompute>> {};

TEST_P(GradientsGolden, AgreeWithTransformersForEveryMicroBatch) {
  const Golden golden(std::get<0>(GetParam()));
  const HostBatch batch = batch_of(golden);
  for (std::int64_t micro_batch = 1; micro_batch <= batch.rows; ++micro_batch) {
    if (batch.rows % micro_batch != 0) continue;
    StepSettings settings;
    settings.micro_batch = micro_batch;
    settings.seq_len = batch.seq_len;
    settings.recompute = std::get<1>(GetParam());
    Trial run(golden, settings);
    const StepResult result = run.step.gradients(batch.of_rank({}), 0, 0);
    EXPECT_EQ(result.good_tokens, Golden::ids(golden.expect, "good_tokens")[0]);
    // float32 arithmetic against float64: 1e-5 is what the reference numbers ask for.
    EXPECT_NEAR(result.loss / golden.values("loss")[0], 1, 1e-5);
    EXPECT_NEAR(result.grad_norm / golden.values("grad_norm")[0], 1, 1e-5);
    for (std::size_t i = 0; i < run.weights.table().parameters.size(); ++i) {
      const std::string& name = run.weights.table().parameters[i].name;
      const Difference d = difference(run.gradient(i), golden.values("grad." + name));
      EXPECT_LT(d.relative_l2, 1e-5) << name << " micro_batch " << micro_batch;
      EXPECT_NEAR(d.ratio, 1, 1e-5) << name << " micro_batch " << micro_batch;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, GradientsGolden,
                         testing::Combine(testing::Values("mqa", "mha", "erf_noscale", "wide_mqa", "wide_mha"),
                                          testing::Values(Recompute::none, Recompute::light, Recompute::block)));

class TokenLossGolden : public testing::TestWithParam<const char*> {};

TEST_P(TokenLossGolden, AgreesWithTransformers) {
  const Golden golden(GetParam());
  const HostBatch batch = batch_of(golden);
  StepSettings settings;
  settings.micro_batch = batch.rows;
  settings.seq_len = batch.seq_len;
  Trial run(golden, settings);
  const Tensor loss = run.device->allocate(Kind::workspace, DType::float64, {1});
  const auto loss_of = [&](const std::vector<std::int32_t>& labels) {
    run.device->fill(loss, 0);
    run.step.model().forward(loss, {batch.ids.data(), labels.data()}, run.weights.units());
    return *loss.as<double>();
  };
  const double sum = loss_of(batch.labels);
  const std::vector<double> expected = golden.values("token_nll");
  std::vector<float> losses;  // of each token alone
  for (std::size_t i = 0; i < batch.labels.size(); ++i) {
    std::vector<std::int32_t> labels(batch.labels.size(), -100);
    labels[i] = batch.labels[i];
    losses.push_back(static_cast<float>(loss_of(labels)));
  }
  EXPECT_LT(difference(losses, expected).relative_l2, 1e-5);
  double total = 0;
  for (const double loss : expected) total += loss;
  EXPECT_NEAR(sum / total, 1, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(, TokenLossGolden, testing::Values("mqa", "mha", "erf_noscale", "wide_mqa", "wide_mha"));

// bfloat16 keeps 8 bits: activations are rounded about ten times on the way, each by up to 2^-9, so a few percent is
// its accuracy. The scale, an average over many elements, must be far better than a factor of 2.
TEST(BfloatGolden, GradientsAreWithinItsRounding) {
  for (const char* name : {"wide_mqa", "wide_mha"}) {
    const Golden golden(name);
    const HostBatch batch = batch_of(golden);
    StepSettings settings;
    settings.micro_batch = batch.rows;
    settings.seq_len = batch.seq_len;
    settings.zero.dtype = DType::bfloat16;
    Trial run(golden, settings);
    const StepResult result = run.step.gradients(batch.of_rank({}), 0, 0);
    EXPECT_NEAR(result.loss / golden.values("loss")[0], 1, 0.01);
    EXPECT_NEAR(result.grad_norm / golden.values("grad_norm")[0], 1, 0.02);
    for (std::size_t i = 0; i < run.weights.table().parameters.size(); ++i) {
      const std::string& parameter = run.weights.table().parameters[i].name;
      const Difference d = difference(run.gradient(i), golden.values("grad." + parameter));
      EXPECT_LT(d.relative_l2, 0.06) << parameter;
      EXPECT_NEAR(d.ratio, 1, 0.03) << parameter;
    }
  }
}

// The K part of c_attn.bias has an exact gradient of 0: its rounding becomes steps of size lr, so it is left out.
bool is_key_bias(const ModelConfig& config, const std::string& name, std::int64_t element) {
  const std::int64_t C = config.n_embd, d = config.head_size();
  return name.ends_with("c_attn.bias") && element >= C && element < C + d;
}

TEST(StepsGolden, SixStepsAgreeWithTransformersForEveryMicroBatch) {
  const Golden golden("steps");
  const SafetensorsReader file(golden.dir + "/batch.safetensors");
  const std::vector<std::int32_t> ids = Golden::ids(file, "input_ids"), labels = Golden::ids(file, "labels");
  const Json json = Json::read_file(golden.dir + "/steps.json");
  Options options;
  options.steps = json.at("steps").integer();
  options.lr = json.at("lr").number();
  options.min_lr = json.at("min_lr").number();
  options.warmup_steps = json.at("warmup_steps").integer();
  const std::int64_t rows = json.at("rows_per_step").integer(), T = json.at("seq_len").integer();
  const auto f = [&](const char* key) { return static_cast<float>(json.at(key).number()); };

  for (const std::int64_t micro_batch : {1, 2, 4, 8}) {
    StepSettings settings;
    settings.micro_batch = micro_batch;
    settings.seq_len = T;
    settings.optimizer = {true, f("beta1"), f("beta2"), f("eps"), f("weight_decay")};
    settings.clip_norm = json.at("clip_norm").number();
    Trial run(golden, settings);
    for (std::int64_t s = 0; s < options.steps; ++s) {
      const auto at = static_cast<std::size_t>(s);
      const double lr = learning_rate(options, s);
      const StepResult result = run.step.run({ids.data() + s * rows * T, labels.data() + s * rows * T, rows}, 0, s, lr);
      EXPECT_NEAR(lr / golden.values("lr")[at], 1, 1e-12);
      EXPECT_EQ(result.good_tokens, Golden::ids(golden.expect, "good_tokens")[at]);
      EXPECT_NEAR(result.loss / golden.values("loss")[at], 1, 1e-5) << s;
      EXPECT_NEAR(result.grad_norm / golden.values("grad_norm")[at], 1, 1e-5) << s;
      EXPECT_NEAR(result.clip_coef / golden.values("clip_coef")[at], 1, 1e-5) << s;
    }
    for (std::size_t i = 0; i < run.weights.table().parameters.size(); ++i) {
      const Parameter& p = run.weights.table().parameters[i];
      std::vector<float> w = run.weight(i);
      std::vector<double> ref = golden.values("weight." + p.name);
      for (std::size_t e = 0; e < w.size(); ++e) {
        if (is_key_bias(golden.source.config(), p.name, static_cast<std::int64_t>(e))) w[e] = 0, ref[e] = 0;
      }
      EXPECT_LT(difference(w, ref).relative_l2, 1e-5) << p.name;
    }
  }
}

TEST(StepsGolden, KeyBiasHasNoGradient) {
  const Golden golden("wide_mqa");
  const HostBatch batch = batch_of(golden);
  StepSettings settings;
  settings.micro_batch = batch.rows;
  settings.seq_len = batch.seq_len;
  Trial run(golden, settings);
  run.step.gradients(batch.of_rank({}), 0, 0);
  for (std::size_t i = 0; i < run.weights.table().parameters.size(); ++i) {
    const std::string& name = run.weights.table().parameters[i].name;
    const std::vector<float> g = run.gradient(i);
    double key = 0, all = 0;
    for (std::size_t e = 0; e < g.size(); ++e) {
      all += g[e] * g[e];
      if (is_key_bias(golden.source.config(), name, static_cast<std::int64_t>(e))) key += g[e] * g[e];
    }
    EXPECT_LE(std::sqrt(key), 1e-6 * std::sqrt(all)) << name;  // the bound of the convention
  }
}

ModelConfig with_dropout(ModelConfig config) {
  config.embd_pdrop = 0.1f;
  config.resid_pdrop = 0.2f;
  config.attn_pdrop = 0.3f;
  return config;
}

// Dropout is keyed by rows of the global batch, so the same elements are dropped however the batch is cut; what is
// recomputed has the bits of what is kept; threads change nothing in our own loops, and these products are too small
// for the library to cut differently.
TEST(Step, SameBitsForRecomputeAndSameDropoutForMicroBatches) {
  const Golden golden("wide_mqa");
  const HostBatch batch = batch_of(golden);
  std::vector<std::vector<float>> whole;
  for (const Recompute recompute : {Recompute::none, Recompute::light, Recompute::block}) {
    for (const std::int64_t micro_batch : {batch.rows, std::int64_t{2}, std::int64_t{1}}) {
      StepSettings settings;
      settings.micro_batch = micro_batch;
      settings.seq_len = batch.seq_len;
      settings.recompute = recompute;
      Trial run(golden, settings, with_dropout(golden.source.config()));
      run.step.gradients(batch.of_rank({}), 7, 3);
      const std::vector<std::vector<float>> gradients = run.gradients();
      if (recompute == Recompute::none) {
        if (micro_batch == batch.rows) whole = gradients;
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          const std::vector<double> ref(whole[i].begin(), whole[i].end());
          EXPECT_LT(difference(gradients[i], ref).relative_l2, 1e-5) << run.weights.table().parameters[i].name;
        }
      } else if (micro_batch == batch.rows) {
        EXPECT_EQ(gradients, whole) << static_cast<int>(recompute);
      }
    }
  }
}

TEST(Step, IsSkippedWithoutGoodTokensAndWhenNotFinite) {
  const Golden golden("mqa");
  const HostBatch batch = batch_of(golden);
  StepSettings settings;
  settings.micro_batch = batch.rows;
  settings.seq_len = batch.seq_len;
  Trial run(golden, settings);
  const std::vector<float> before = run.weight(0);

  const std::vector<std::int32_t> ignored(batch.labels.size(), -100);
  const StepResult none = run.step.run({batch.ids.data(), ignored.data(), batch.rows}, 0, 0, 0.1);
  EXPECT_EQ(none.outcome, StepResult::Outcome::no_good_tokens);
  EXPECT_EQ(none.loss, 0);
  EXPECT_EQ(none.grad_norm, 0);  // gradients of the step before, if any, are gone too
  EXPECT_EQ(before, run.weight(0));
  EXPECT_EQ(run.step.optimizer().updates(), 0);

  run.weights.load([&](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    golden.source.read(i, first, count, out);
    if (i == 3) out[0] = std::numeric_limits<float>::infinity();
  });
  const StepResult bad = run.step.run(batch.of_rank({}), 0, 0, 0.1);
  EXPECT_EQ(bad.outcome, StepResult::Outcome::not_finite);
  EXPECT_EQ(before, run.weight(0));
}

// FNV-1a over ids and labels in turn, as 32-bit words; its offset basis is that of the row's number. (0, 1; 2, -100)
// and (3, 4; 5, 6), by hand in Python: both rows' sums.
TEST(Step, BatchHashIsOfIdsAndLabelsByRow) {
  const Golden golden("mqa");
  StepSettings settings;
  settings.seq_len = 2;
  Trial run(golden, settings);
  const auto hash = [&](std::vector<std::int32_t> ids, std::vector<std::int32_t> labels) {
    return run.step.gradients({ids.data(), labels.data(), 2}, 0, 0).batch_hash;
  };
  EXPECT_EQ(hash({0, 1, 3, 4}, {2, -100, 5, 6}), 0x4ac80842f13f19f2u);
  EXPECT_NE(hash({0, 1, 3, 4}, {2, 7, 5, 6}), 0x4ac80842f13f19f2u);
  EXPECT_NE(hash({3, 4, 0, 1}, {5, 6, 2, -100}), 0x4ac80842f13f19f2u);
}

TEST(Step, AnIgnoredRowChangesNothing) {
  const Golden golden("wide_mqa");  // its last row is ignored
  const HostBatch batch = batch_of(golden);
  StepSettings settings;
  settings.micro_batch = 1;
  settings.seq_len = batch.seq_len;
  Trial all(golden, settings), without(golden, settings);
  all.step.gradients(batch.of_rank({}), 0, 0);
  without.step.gradients({batch.ids.data(), batch.labels.data(), batch.rows - 1}, 0, 0);
  const auto a = all.gradients(), b = without.gradients();
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t e = 0; e < a[i].size(); ++e) ASSERT_EQ(a[i][e], b[i][e]);  // -0 == 0
  }
}

TEST(Step, DryRunFindsTheMemoryOfTheRun) {
  const Golden golden("mqa");
  const HostBatch batch = batch_of(golden);
  StepSettings settings;
  settings.micro_batch = batch.rows;
  settings.seq_len = batch.seq_len;
  const auto measure = [&](bool dry) {
    const auto mesh = Mesh::single();
    const auto device = make_cpu_device(2, dry);
    ModelWeights weights(*device, *mesh, golden.source.config(), settings.zero);
    Step step(weights, settings);
    step.run(batch.of_rank({}), 0, 0, 0.1);
    return device->memory();
  };
  EXPECT_EQ(measure(true), measure(false));
}

TEST(Step, MemoryGrowsLinearlyWithT) {
  ModelConfig config = Golden("mqa").source.config();
  config.n_positions = 32768;
  const auto total = [&](std::int64_t T) {
    const auto mesh = Mesh::single();
    const auto device = make_cpu_device(2, true);
    ModelWeights weights(*device, *mesh, config);
    StepSettings settings;
    settings.seq_len = T;
    settings.recompute = Recompute::none;
    Step(weights, settings).run_empty();
    std::int64_t sum = 0;
    for (const std::int64_t bytes : device->memory()) sum += bytes;
    return static_cast<double>(sum);
  };
  // A part that does not depend on T aside, four times the length takes four times the memory.
  const double a = total(4096), b = total(8192), c = total(32768);
  EXPECT_LT((c - b) / (b - a), 6.3);  // 6 when linear, 12 or more with any T x T part
}

}  // namespace
}  // namespace onescale

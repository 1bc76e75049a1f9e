// Whole runs of `onescale train` and `eval`, with every number that they report beside one found from the files alone:
// a plain float64 forward and optimizer, the shards' bytes, closed forms of the schedules.
#include <cmath>
#include <csignal>
#include <cstring>
#include <numbers>
#include <numeric>

#include <gtest/gtest.h>

#include "data/order.h"
#include "model/parameters.h"
#include "parallel/file.h"
#include "tests/runs.h"
#include "train/commands.h"
#include "train/training_run.h"
#include "train/verify.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t T = 16;
const std::string answer = "an answer";

// Prompts as long as several rows, so that some steps of one row have no target.
struct Corpus {
  Corpus() {
    std::ofstream lines(dir / "lines.jsonl");
    for (std::size_t i = 0; i < 60; ++i)  // a digit is a token
      lines << R"({"prompt": ")" << std::string(i / 2, static_cast<char>('0' + i % 10)) << R"( ", "completion": ")"
            << answer << "\"}\n";
    lines.close();
    PrepareOptions options;
    options.inputs = {dir / "lines.jsonl"};
    options.out = dir / "data";
    options.vocab_size = 270;
    options.validation_share = 0.3;
    options.shard_tokens = 300;  // several shards
    options.threads = 1;
    prepare(options);
    for (const std::string split : {"train", "val"}) {
      for (int shard = 0; fs::exists(dir / str("data/", split, "_00000", shard, ".bin")); ++shard) {
        const std::string file = dir / str("data/", split, "_00000", shard), bytes = read_text(file + ".bin"),
                          mask = read_text(file + ".mask");
        const std::size_t n = (bytes.size() - 1024) / 2;
        for (std::size_t i = 0; i < n; ++i) {
          std::uint16_t id = 0;
          std::memcpy(&id, &bytes[1024 + 2 * i], 2);
          (split == "train" ? train : val).push_back({id, (mask[i / 8] >> i % 8 & 1) == 0});
        }
      }
    }
  }
  struct Token {
    std::int32_t id;
    bool target;
  };
  // The windows of so many tokens with these numbers; beyond the end there is no target.
  static HostBatch rows(const std::vector<Token>& tokens, const std::vector<std::int64_t>& windows,
                        std::int64_t length = T) {
    HostBatch batch{std::ssize(windows), length, {}, {}};
    for (const std::int64_t window : windows) {
      for (std::int64_t t = window * length; t < (window + 1) * length; ++t) {
        const auto at = static_cast<std::size_t>(t);
        batch.ids.push_back(at < tokens.size() ? tokens[at].id : 0);
        batch.labels.push_back(at + 1 < tokens.size() && tokens[at + 1].target ? tokens[at + 1].id : -100);
      }
    }
    return batch;
  }
  TempDir dir;
  std::vector<Token> train, val;
};

Corpus& corpus() {
  static Corpus corpus;
  return corpus;
}

Options options_of(const std::string& run) {
  Options o;
  o.command = "train", o.letter = 't';
  o.data = corpus().dir / "data";
  o.run_dir = corpus().dir / run;
  o.n_layer = 2, o.n_head = 2, o.n_embd = 16, o.n_positions = T;
  o.initializer_range = 0.2;
  o.embd_pdrop = o.attn_pdrop = o.resid_pdrop = 0;
  o.steps = 12;
  o.global_batch = o.micro_batch = 1;
  o.lr = 0x1p-6, o.min_lr = 0x1p-8;
  o.warmup_steps = 3, o.decay_steps = 4;
  o.eps = 1e-3;  // so that rounding does not become steps
  o.clip_norm = 3.5;
  o.eval_every = 4, o.eval_rows = 0;
  o.save_every = 1, o.keep_last = 100;
  o.threads = 1;
  return o;
}

std::vector<std::int64_t> first(std::int64_t n) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Of step s of 12, after 3 of warm-up.
double rate(const Options& o, std::int64_t s) {
  if (s < 3) return o.lr * static_cast<double>(s + 1) / 3;
  if (o.schedule == "constant") return o.lr;
  if (o.schedule == "wsd") return s < 8 ? o.lr : o.lr - (o.lr - o.min_lr) * static_cast<double>(s - 8) / 4;
  const double x = static_cast<double>(s - 3) / 9;
  return o.schedule == "linear" ? o.lr - (o.lr - o.min_lr) * x
                                : o.min_lr + (o.lr - o.min_lr) * (1 + std::cos(std::numbers::pi * x)) / 2;
}

VerifyCase case_of(const std::string& dir, const HostBatch& batch) {
  const auto source = std::make_shared<ModelSource>(dir);
  Options options;
  options.threads = 1;
  return gradient_of({source->config(),
                      [source](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
                        source->read(i, first, count, out);
                      },
                      batch, options});
}

std::string step_dir(const std::string& run, std::int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08d", static_cast<int>(step));
  return corpus().dir / str(run, "/checkpoints/", name);
}

// Begins a run and saves it before its first step; returns that checkpoint.
std::string begin(const std::string& run, const Options& o, World& world) {
  TrainingRun training(o, world);
  std::raise(SIGUSR1);
  EXPECT_EQ(training.run(), exit_requeue);
  return step_dir(run, 0);
}

const std::string& beginning() {
  static const std::string dir = [] {
    World world;
    return begin("beginning", options_of("beginning"), world);
  }();
  return dir;
}

// The next `n` tokens: the likeliest, or those that the documented draws (seed, index) choose, likelier ones first.
std::string plain_text(const VerifyCase& c, const Tokenizer& tokenizer, std::vector<std::int32_t> ids, int n,
                       double temperature) {
  const PlainWeights weights = plain_weights(c);
  std::string text;
  for (; n > 0; --n) {
    std::vector<std::int32_t> labels(ids.size(), -100);
    std::vector<std::pair<double, std::int32_t>> losses;
    for (labels.back() = 0; labels.back() < c.config.vocab_size; ++labels.back())
      losses.emplace_back(plain_loss(c.config, weights, std::ssize(ids), ids, labels), labels.back());
    std::ranges::sort(losses);
    std::size_t chosen = 0;
    if (temperature > 0) {
      double total = 0;
      for (const auto& [loss, id] : losses) total += std::exp(-loss / temperature);
      const Philox word =
          philox({static_cast<std::uint32_t>(ids.size()), 0, 0, static_cast<std::uint32_t>(Site::sample)}, 1);
      double left = (word[0] + 0.5) / 0x1p32 * total;
      while ((left -= std::exp(-losses[chosen].first / temperature)) >= 0) ++chosen;
    }
    if (losses[chosen].second == tokenizer.eot()) break;
    ids.push_back(losses[chosen].second);
    text += tokenizer.piece_bytes(ids.back());
  }
  return text;
}

// A run that is stopped and goes on in the middle, with another global_batch if asked.
void expect_plain(const std::string& run, Options o, std::int64_t later_batch = 1) {
  World world;
  const std::string start = begin(run, o, world);
  o.stop_after = 7;
  ASSERT_EQ(TrainingRun(o, world).run(), exit_requeue);
  o.stop_after = 0;
  o.global_batch = later_batch;
  ASSERT_EQ(TrainingRun(o, world).run(), 0);

  const Tokenizer tokenizer = Tokenizer::load(o.data + "/tokenizer.model");
  const ModelConfig config = read_config(start);
  EXPECT_EQ(config.n_layer, o.n_layer);
  EXPECT_EQ(config.n_head, o.n_head);
  EXPECT_EQ(config.n_embd, o.n_embd);
  EXPECT_EQ(config.n_inner, o.n_inner ? o.n_inner : 4 * o.n_embd);
  EXPECT_EQ(config.n_positions, o.n_positions);
  EXPECT_EQ(config.vocab_size, tokenizer.vocab_size());
  EXPECT_EQ(config.multi_query, o.multi_query);
  EXPECT_EQ(config.tie_word_embeddings, o.tie_word_embeddings);
  EXPECT_EQ(config.gelu == Gelu::erf, o.activation_function == "gelu");
  EXPECT_EQ(config.scale_attn_weights, o.scale_attn_weights);
  EXPECT_EQ(config.layer_norm_epsilon, static_cast<float>(o.layer_norm_epsilon));

  const std::int64_t windows = (std::ssize(corpus().train) - 1) / T;
  const auto seed = static_cast<std::uint64_t>(o.seed);
  PlainOptimizer plain{o.optimizer == "adamw", 0, o.beta1, o.beta2, o.eps, o.weight_decay};
  PlainWeights weights = plain_weights(case_of(start, {}));
  std::int64_t samples = 0, skipped = 0, clipped = 0, s = 0, evaluations = 0, samples_written = 0;
  for (const Json& line : read_metrics(o.run_dir)) {
    SCOPED_TRACE(line.dump());
    EXPECT_EQ(line.at("step").integer(), s);
    if (line.has("event") && line.at("event").string() == "sample") {
      std::vector<std::int32_t> prompt = tokenizer.encode(o.sample_prompt);
      prompt.insert(prompt.begin(), tokenizer.eot());
      const Json wanted =
          Json::object({{"text", plain_text(case_of(step_dir(run, s), {}), tokenizer, prompt, 4, 0.8)}});
      EXPECT_EQ(line.at("text").string(), Json::parse(wanted.dump(), "a sample").at("text").string());
      ++samples_written;
      continue;
    }
    if (line.has("event")) {
      const std::int64_t all = (std::ssize(corpus().val) - 2) / T + 1;
      const HostBatch batch = Corpus::rows(corpus().val, first(o.eval_rows > 0 ? o.eval_rows : all));
      const VerifyCase c = case_of(step_dir(run, s), batch);
      const double loss = plain_loss(c, plain_weights(c)),
                   nats = loss * static_cast<double>(line.at("good_tokens").integer());
      EXPECT_EQ(line.at("good_tokens").integer(), count_good_tokens(batch.labels.data(), std::ssize(batch.labels)));
      EXPECT_NEAR(line.at("loss").number() / loss, 1, 1e-5);
      EXPECT_NEAR(line.at("perplexity").number() / std::exp(loss), 1, 1e-4);
      // Every completion is a target, and of the ends of text but the first; these have no bytes.
      const Json made = Json::read_file(o.data + "/prepare.json");
      const auto bytes = static_cast<double>(made.at("val").at("documents").integer() * std::ssize(answer));
      if (o.eval_rows == 0) {
        EXPECT_NEAR(line.at("bits_per_byte").number() / (nats / std::log(2.0) / bytes), 1, 1e-5);
      }
      ++evaluations;
      continue;
    }
    const std::int64_t rows = s < 7 ? 1 : later_batch;
    std::vector<std::int64_t> numbers;
    for (std::int64_t r = samples; r < samples + rows; ++r)
      numbers.push_back(permute(r % windows, windows, seed, r / windows));
    samples += rows;
    const HostBatch batch = Corpus::rows(corpus().train, numbers);
    const std::int64_t good = count_good_tokens(batch.labels.data(), std::ssize(batch.labels));
    skipped += good == 0;
    EXPECT_EQ(line.at("good_tokens").integer(), good);
    EXPECT_EQ(line.at("tokens_seen").integer(), samples * T);
    EXPECT_EQ(line.at("skipped_steps").integer(), skipped);
    EXPECT_NEAR(line.at("lr").number() / rate(o, s), 1, 1e-12);
    // What was saved before this step is where the plain run is.
    const VerifyCase c = case_of(step_dir(run, s), batch);
    for (const auto& [name, saved] : plain_weights(c)) {
      double error = 0;  // the rounding of the weights and of their gradients, in steps of some 1e-2
      for (std::size_t i = 0; i < saved.size(); ++i) error = std::max(error, std::abs(saved[i] - weights.at(name)[i]));
      EXPECT_LE(error, 2e-6) << name;
    }
    double norm = 0, coefficient = 1;
    if (good > 0) {
      EXPECT_NEAR(line.at("loss").number() / plain_loss(c, plain_weights(c)), 1, 1e-5);
      const WholeTensors g = measure_alone(world.communicator(), c).gradient;
      PlainWeights gradient;
      for (const std::vector<float>& tensor : g) norm += squares(tensor);
      norm = std::sqrt(norm);
      coefficient = o.clip_norm > 0 ? std::min(1.0, o.clip_norm / norm) : 1;
      const ParameterTable table = gpt_bigcode_table(c.config);
      for (std::size_t i = 0; i < g.size(); ++i)
        for (const float x : g[i]) gradient[table.parameters[i].name].push_back(x * coefficient);
      plain.lr = rate(o, s);
      plain.update(weights, gradient);
    } else {
      EXPECT_EQ(line.at("loss").number(), 0);
    }
    clipped += coefficient < 1;
    EXPECT_NEAR(line.at("grad_norm").number(), norm, 1e-5 * norm);
    EXPECT_NEAR(line.at("clip_coef").number() / coefficient, 1, 1e-5);
    EXPECT_EQ(line.at("clipped_steps").integer(), clipped);
    ++s;
  }
  EXPECT_EQ(s, 12);
  EXPECT_EQ(evaluations, 3);
  EXPECT_GT(skipped, 1);
  EXPECT_EQ(clipped > 1, o.clip_norm > 0);
  EXPECT_LT(clipped, s - skipped);
  EXPECT_EQ(samples_written, o.sample_every > 0 ? 2 : 0);
}

TEST(PlainRun, AdamWWithCosine) {
  expect_plain("cosine", options_of("cosine"), 2);
}

TEST(PlainRun, AdamWWithLinearDecayOfAnotherModel) {
  Options o = options_of("linear");
  o.schedule = "linear";
  o.beta1 = 0.8, o.beta2 = 0.9;
  o.weight_decay = 0.5;
  o.multi_query = o.tie_word_embeddings = o.scale_attn_weights = false;
  o.activation_function = "gelu";
  o.layer_norm_epsilon = 1e-2;
  o.n_inner = 20;
  o.n_positions = T + 5, o.seq_len = T;
  o.seed = 5;
  expect_plain("linear", o, 3);
}

TEST(PlainRun, SgdWithConstantRateIntoTheNextEpoch) {
  Options o = options_of("sgd");
  o.schedule = "constant";
  o.optimizer = "sgd";
  o.clip_norm = 0;
  expect_plain("sgd", o, 30);
}

TEST(PlainRun, AdamWWithStableRateAndDecayAndSamples) {
  Options o = options_of("wsd");
  o.schedule = "wsd";
  o.eval_rows = 2;
  o.sample_every = 6;
  o.sample_prompt = "12 a";
  o.sample_tokens = 4;
  expect_plain("wsd", o);
}

TEST(PlainRun, EvalOfRowsOfAnotherLength) {
  Options o = options_of("eval");
  o.model = corpus().dir / "dropping";  // none of it here
  fs::copy(beginning(), o.model);
  ModelConfig dropping = read_config(o.model);
  dropping.embd_pdrop = dropping.attn_pdrop = dropping.resid_pdrop = 0.5;
  write_text(o.model + "/config.json", config_json(dropping));
  o.seq_len = 11;
  o.micro_batch = 4;  // of which the last one is short
  for (const std::string split : {"train", "val"}) {
    const std::vector<Corpus::Token>& tokens = split == "train" ? corpus().train : corpus().val;
    for (const std::int64_t rows : {(std::ssize(tokens) - 2) / 11 + 1, std::int64_t{9}}) {
      o.split = split;
      o.eval_rows = rows == 9 ? rows : 0;
      const HostBatch batch = Corpus::rows(tokens, first(rows), 11);
      const VerifyCase c = case_of(beginning(), batch);
      const double loss = plain_loss(c, plain_weights(c));
      const std::int64_t good = count_good_tokens(batch.labels.data(), std::ssize(batch.labels));
      testing::internal::CaptureStdout();
      EXPECT_EQ(eval_command(o), 0);
      std::fflush(stdout);
      const std::string said = testing::internal::GetCapturedStdout();
      char text[64];
      std::snprintf(text, sizeof text, ": loss %.4f (perplexity %.2f,", loss, std::exp(loss));
      EXPECT_NE(said.find(text), std::string::npos) << said << text;
      EXPECT_NE(said.find(str(" on ", good, " tokens")), std::string::npos) << said << good;
    }
  }
}

TEST(PlainRun, GenerateWritesThePlainText) {
  Options o = options_of("generate");
  o.model = corpus().dir / "exported";
  Options out = o;
  out.model = beginning();
  out.out = o.model;
  ASSERT_EQ(export_command(out), 0);
  EXPECT_EQ(read_text(o.model + "/tokenizer.model"), read_text(beginning() + "/tokenizer.model"));
  const Tokenizer tokenizer = Tokenizer::load(o.model + "/tokenizer.model");
  const std::string text = "12 a", file = corpus().dir / "prompt.txt";
  write_text(file, text);
  for (const bool infill : {false, true}) {
    for (const double temperature : {0.0, 0.5}) {
      o.infill = infill;
      o.suffix = infill ? "er" : "";
      o.temperature = temperature;
      std::vector<std::int32_t> ids = {tokenizer.eot()};
      const auto append = [&](std::string_view text) {
        for (const std::int32_t id : tokenizer.encode(text)) ids.push_back(id);
      };
      if (infill) ids.push_back(tokenizer.fim_prefix());
      append(text);
      if (infill) ids.push_back(tokenizer.fim_suffix()), append(o.suffix), ids.push_back(tokenizer.fim_middle());
      for (const std::int64_t n : {std::int64_t{5}, std::int64_t{100}}) {  // 100: one more than there are positions for
        o.max_new_tokens = n;
        o.prompt = n == 5 ? text : "";
        o.prompt_file = n == 5 ? "" : file;
        const std::string wanted = plain_text(case_of(beginning(), {}), tokenizer, ids,
                                              static_cast<int>(std::min(n, T + 1 - std::ssize(ids))), temperature);
        testing::internal::CaptureStdout();
        EXPECT_EQ(generate_command(o), 0);
        std::fflush(stdout);
        EXPECT_EQ(testing::internal::GetCapturedStdout(), wanted + "\n");
        EXPECT_FALSE(wanted.empty());
      }
    }
  }
}

// A token whose embedding is too large for the sums of float32: the steps that read it are skipped, the others are not,
// and only those in a row end a run.
TEST(PlainRun, StepsThatAreNotFiniteChangeNothing) {
  World world;
  Options o = options_of("rare");
  o.model = corpus().dir / "rare_model";
  Options untied = options_of("untied");
  untied.tie_word_embeddings = false;
  fs::copy(begin("untied", untied, world), o.model);
  const std::int32_t rare = Tokenizer::load(o.model + "/tokenizer.model").encode("7")[0];
  const SafetensorsReader reader(o.model + "/model.safetensors");
  const StoredTensor& wte = reader.at("transformer.wte.weight");
  std::string bytes = read_text(o.model + "/model.safetensors");
  const std::vector<float> huge(static_cast<std::size_t>(o.n_embd), 3e38f);
  const std::size_t at = static_cast<std::size_t>(wte.offset) + static_cast<std::size_t>(rare) * huge.size() * 4;
  std::memcpy(&bytes[at], huge.data(), huge.size() * 4);
  write_text(o.model + "/model.safetensors", bytes);
  o.steps = 60, o.schedule = "constant", o.eval_every = 0;
  o.max_bad_steps = 3;
  o.save_every = 0;  // at the end alone
  ASSERT_EQ(TrainingRun(o, world).run(), 0);
  const std::int64_t windows = (std::ssize(corpus().train) - 1) / T;
  std::int64_t s = 0, skipped = 0, bad = 0;
  for (const Json& line : read_metrics(o.run_dir)) {
    const HostBatch batch = Corpus::rows(corpus().train, {permute(s % windows, windows, 1, s / windows)});
    const bool reads = std::ranges::find(batch.ids, rare) != batch.ids.end();
    const bool good = count_good_tokens(batch.labels.data(), T) > 0;
    bad += reads && good;
    skipped += reads || !good;
    EXPECT_EQ(line.at("skipped_steps").integer(), skipped) << line.dump();
    ++s;
  }
  EXPECT_GT(bad, o.max_bad_steps);
  EXPECT_EQ(names(o.run_dir + "/checkpoints"), std::set<std::string>{"step-00000060"});
  EXPECT_EQ(s, 60);
}

// 0.25 in the model's config.json holds unless an option says otherwise.
TEST(PlainRun, DropoutIsTheModelsUnlessGiven) {
  World world;
  Options o = options_of("inherits");
  o.model = corpus().dir / "quarter";
  fs::copy(beginning(), o.model);
  ModelConfig config = read_config(o.model);
  config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.25;
  write_text(o.model + "/config.json", config_json(config));
  o.given = {"attn_pdrop"};
  o.attn_pdrop = 0.125;
  o.stop_after = 1;
  ASSERT_EQ(TrainingRun(o, world).run(), exit_requeue);
  const ModelConfig saved = read_config(step_dir("inherits", 1));
  EXPECT_EQ(saved.embd_pdrop, 0.25f);
  EXPECT_EQ(saved.resid_pdrop, 0.25f);
  EXPECT_EQ(saved.attn_pdrop, 0.125f);
}

}  // namespace
}  // namespace onescale

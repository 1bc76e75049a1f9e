// What a dry run finds is what the run takes, to the byte, whatever the sizes and the labels.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "model/decoder.h"
#include "tests/runs.h"
#include "train/commands.h"
#include "train/evaluate.h"
#include "train/training_run.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

class Sizes {
 public:
  explicit Sizes(std::uint32_t seed) : random_(seed) {}
  std::int64_t of(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  template <class T>
  T one(std::initializer_list<T> values) {
    return values.begin()[of(0, std::ssize(values) - 1)];
  }
  std::mt19937& random() { return random_; }

 private:
  std::mt19937 random_;
};

struct Sizing {
  ModelConfig config;
  StepSettings settings;
  int threads;
  bool train;

  explicit Sizing(Sizes sizes) {
    const std::int64_t heads = sizes.of(1, 4);
    config = {.vocab_size = sizes.one<std::int64_t>({17, 250, 300, 1000}),
              .n_positions = 300,
              .n_embd = heads * 8 * sizes.of(1, 4),
              .n_layer = 1,
              .n_head = heads,
              .n_inner = sizes.of(8, 60),
              .multi_query = sizes.of(0, 1) == 1,
              .tie_word_embeddings = sizes.of(0, 1) == 1};
    settings.micro_batch = sizes.of(1, 4);
    settings.seq_len = sizes.of(1, 150 / settings.micro_batch);
    settings.zero.dtype = sizes.one({DType::float32, DType::bfloat16});
    settings.recompute = sizes.one({Recompute::none, Recompute::light, Recompute::block});
    threads = static_cast<int>(sizes.of(1, 3));
    train = sizes.of(0, 2) > 0;
  }
  std::int64_t tokens() const { return settings.micro_batch * settings.seq_len; }

  // The memory of a dry run, or of micro-batches with each number of good tokens. Scratch grows as needed.
  std::array<std::int64_t, kind_count> memory(bool dry, std::mt19937& random) const {
    const auto mesh = Mesh::single();
    const auto device = make_cpu_device(threads, dry);
    ModelWeights weights(*device, *mesh, config, settings.zero);
    std::optional<Step> step;
    std::optional<GptBigCode> alone;
    if (train)
      step.emplace(weights, settings);
    else
      alone.emplace(*device, *mesh, config, settings.sp_mode, settings.micro_batch, settings.seq_len,
                    settings.zero.dtype, settings.recompute, false);
    GptBigCode& model = train ? step->model() : *alone;
    Evaluator evaluator(weights, model, settings.micro_batch, settings.seq_len);
    if (dry) {
      if (train) step->run_empty();
      evaluator.run_empty();
      return device->memory();
    }
    const Tensor sum = device->allocate(Kind::workspace, DType::float64, {1});
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens()), 1), labels(ids.size(), -100);
    std::vector<std::size_t> order(ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t next : order) {  // one more good token each time
      labels[next] = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(config.vocab_size));
      if (train) step->run({ids.data(), labels.data(), settings.micro_batch}, 0, 0, 0.1);
      model.forward(sum, {ids.data(), labels.data()}, weights.units());
    }
    auto all = device->memory();
    all[static_cast<std::size_t>(Kind::workspace)] -= sum.bytes();
    return all;
  }
};

TEST(DryRun, FindsTheMemoryOfEveryPatternOfLabels) {
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const Sizing sizing{Sizes(seed)};
    std::mt19937 random(seed);
    EXPECT_EQ(sizing.memory(true, random), sizing.memory(false, random))
        << "seed " << seed << ": V " << sizing.config.vocab_size << " C " << sizing.config.n_embd << " B "
        << sizing.settings.micro_batch << " T " << sizing.settings.seq_len << " threads " << sizing.threads;
  }
}

// Rows of which some tokens are good.
void write_batch(const std::string& path, std::int64_t rows, std::int64_t T, Sizes& sizes) {
  SafetensorsWriter file(path, {{"input_ids", FileType::I64, {rows, T}}, {"labels", FileType::I64, {rows, T}}});
  std::vector<std::int64_t> ids(static_cast<std::size_t>(rows * T), 1), labels = ids;
  for (std::int64_t& label : labels) label = sizes.of(0, 1) == 0 ? -100 : 2;
  labels[0] = 0;
  file.write_bytes(ids.data(), rows * T * 8);
  file.write_bytes(labels.data(), rows * T * 8);
  file.close();
}

// The program reserves what its dry run finds, and an operation that needs more is an error: none is met, whatever the
// sizes, in training on prompts and completions with evaluation and samples, and in what is done with its model.
TEST(DryRun, EveryCommandKeepsToIt) {
  const TempDir dir;
  std::ofstream lines(dir / "lines.jsonl");
  for (int i = 0; i < 300; ++i) {
    lines << R"({"prompt": "question )" << i << std::string(static_cast<std::size_t>(i % 40), '?')
          << R"( ", "completion": "answer )" << i * i << R"("})"
          << "\n";
  }
  lines.close();
  PrepareOptions prepare_options;
  prepare_options.inputs = {dir / "lines.jsonl"};
  prepare_options.out = dir / "data";
  prepare_options.vocab_size = 300;
  prepare_options.validation_share = 0.2;
  prepare_options.threads = 1;
  prepare(prepare_options);
  World world;
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    Sizes sizes(seed);
    Options o;
    o.command = "train", o.letter = 't';
    o.data = dir / "data";
    o.run_dir = dir / str("run", seed);
    o.n_head = sizes.of(1, 3);
    o.n_embd = o.n_head * 8 * sizes.of(1, seed == 0 ? 1 : 3);
    o.n_inner = sizes.of(8, 60);
    o.n_layer = 1;
    o.n_positions = sizes.of(100, 256);
    o.multi_query = sizes.of(0, 1) == 1;
    o.vocab_size = seed == 0 ? 70000 : sizes.of(300, 2000);
    o.micro_batch = sizes.of(1, 3);
    o.global_batch = o.micro_batch * sizes.of(1, 2);
    o.seq_len = sizes.of(50, 100);
    o.dtype = sizes.one({"float32", "bfloat16"});
    o.threads = sizes.of(1, 3);
    o.steps = 2, o.warmup_steps = 0;
    o.eval_every = o.sample_every = o.save_every = 2;
    o.eval_rows = sizes.of(1, 9);
    o.sample_prompt = std::string(static_cast<std::size_t>(sizes.of(0, 80)), '?');
    o.sample_tokens = sizes.of(1, 200);
    SCOPED_TRACE(print_config(o));
    EXPECT_EQ(train_command(o, world), 0);
    o.model = o.run_dir;
    o.eval_rows = 0;
    o.micro_batch = sizes.of(1, 8);
    o.seq_len = sizes.of(1, o.n_positions);
    EXPECT_EQ(eval_command(o), 0);
    o.prompt = o.sample_prompt;
    o.max_new_tokens = sizes.of(1, 200);
    EXPECT_EQ(generate_command(o), 0);
    o.out = dir / str("out", seed);
    EXPECT_EQ(export_command(o), 0);
    o.batch = dir / str("batch", seed);
    o.out = dir / str("gradients", seed);
    write_batch(o.batch, o.micro_batch, o.seq_len, sizes);
    o.logits = true;
    EXPECT_EQ(gradients_command(o, world), 0);
  }
}

}  // namespace
}  // namespace onescale

#include "model/head.h"

#include <gtest/gtest.h>

#include <random>

#include "model/parameters.h"
#include "parallel/mesh.h"
#include "parallel/zero.h"

namespace onescale {
namespace {

// How many tokens are good is not known beforehand, and fewer of them can need more scratch: a dry run finds the most
// that any number of them needs, to the byte.
TEST(Head, ADryRunFindsTheMemoryOfEveryNumberOfGoodTokens) {
  std::mt19937 random(1);
  const auto one = [&](std::initializer_list<std::int64_t> values) { return values.begin()[random() % values.size()]; };
  for (int trial = 0; trial < 12; ++trial) {
    ModelConfig config{.vocab_size = one({17, 256, 300, 1000}),
                       .n_positions = 1,
                       .n_embd = one({8, 40, 64, 128}),
                       .n_layer = 1,
                       .n_head = 1,
                       .n_inner = 1};
    config.tie_word_embeddings = random() % 2 == 0;
    const std::int64_t n = one({5, 130, 256, 290});
    const bool train = random() % 2 > 0;
    const int threads = static_cast<int>(one({1, 2, 3}));
    ZeroSettings settings;
    settings.dtype = random() % 2 == 0 ? DType::float32 : DType::bfloat16;
    const auto memory = [&](bool dry) {
      const auto mesh = Mesh::single();
      const auto device = make_cpu_device(threads, dry);
      const Placement place(gpt_bigcode_table(config), mesh->layout);
      const auto weights = make_weights(*device, *mesh, place, settings);
      const auto gradients = make_gradients(*device, *mesh, place, settings);
      const ModelShard shard(config, 1, 0);
      const TensorParallel tp(*device, *mesh->tp, n * config.n_embd);
      Head head(*device, config, shard, tp, n, settings.dtype, train);
      const auto take = [&] { return device->allocate(Kind::activations, DType::float32, {n, config.n_embd}); };
      const Tensor x = take(), dx = take(), sum = device->allocate(Kind::workspace, DType::float64, {1});
      if (dry) head.run_empty();
      for (std::int64_t good = dry ? n : 0; good <= n; ++good) {
        std::vector<std::int32_t> labels(static_cast<std::size_t>(n), -100);
        std::fill_n(labels.begin(), good, 3);
        std::shuffle(labels.begin(), labels.end(), random);
        head.set_labels(labels);
        gradients->begin_step(1);
        if (train)
          head.loss_backward(sum, dx, x, *weights, *gradients, 1);
        else
          head.loss(sum, x, *weights);
      }
      return device->memory();
    };
    EXPECT_EQ(memory(true), memory(false)) << trial << ": V " << config.vocab_size << " C " << config.n_embd << " n "
                                           << n << " train " << train << " threads " << threads;
  }
}

}  // namespace
}  // namespace onescale

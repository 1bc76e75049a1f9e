// The plain reference of `onescale verify` beside the trainer, and beside gradients with a fault.
#include <gtest/gtest.h>

#include "model/parameters.h"
#include "train/commands.h"
#include "train/verify_sheet.h"

namespace onescale {
namespace {

Options alone() {
  Options options;
  options.threads = 1;
  return options;
}

struct Judged {
  explicit Judged(const VerifyCase& c)
      : parts(tensor_parts(c.config, c.batch.seq_len)),
        slopes(plain_slopes(c, parts)),
        gradient(measure_alone(World().communicator(), c).gradient) {}
  std::vector<Part> parts;
  std::vector<Slopes> slopes;
  WholeTensors gradient;
};

// Every two of: one K/V head or many, tied or not, both forms of GELU, scores scaled or not. (`verify` has two of these
// models itself.)
TEST(PlainSlopes, AreThoseOfTheTrainer) {
  struct Variant {
    bool multi_query, tied, erf, scaled;
  };
  for (const auto& [multi_query, tied, erf, scaled] : {Variant{true, false, false, false},
                                                       {false, true, false, true},
                                                       {true, true, true, false},
                                                       {false, false, true, true}}) {
    VerifyCase c = uneven(small_case(alone(), 1, multi_query, tied));
    c.config.gelu = erf ? Gelu::erf : Gelu::tanh;
    c.config.scale_attn_weights = scaled;
    c.config.layer_norm_epsilon = 1e-2f;  // far from what is taken where none is read
    const Judged judged(c);
    const auto [error, part] = worst_slope(judged.slopes, judged.gradient);
    EXPECT_LT(error, 2e-5) << part << " mqa " << multi_query << " tied " << tied << " erf " << erf;
  }
}

// Dropout of every site, layer, row, position, seed and step is that of its key.
TEST(PlainLoss, IsTheTrainersWithDropout) {
  VerifyCase c = small_case(alone(), 1);
  c.config.embd_pdrop = 0.1f, c.config.attn_pdrop = 0.2f, c.config.resid_pdrop = 0.3f;
  const auto mesh = Mesh::single();
  const auto device = make_cpu_device(1, false);
  ModelWeights weights(*device, *mesh, c.config);
  weights.load(c.weights);
  c.options.micro_batch = 2;
  Step step(weights, step_settings(c.options, c.batch.seq_len));
  for (const auto& [seed, number] : {std::pair{9, 0}, {9, 5}, {10, 5}}) {
    const PlainDropout dropout = [key = static_cast<std::uint64_t>(seed), at = number](
                                     Site site, std::int64_t layer, std::int64_t row, std::int64_t position,
                                     std::int64_t head, std::int64_t element) {
      const double p = site == Site::embedding ? 0.1 : site == Site::attention ? 0.2 : 0.3;
      const auto group = static_cast<std::uint32_t>(site == Site::attention ? head << 24 | element / 4 : element / 4);
      const Philox words = philox(dropout_counter(site, layer, at, row, position, group), key);
      return words[static_cast<std::size_t>(element % 4)] < p * 0x1p32 ? 0 : 1 / (1 - p);
    };
    const double loss = step.gradients(c.batch.of_rank({}), static_cast<std::uint64_t>(seed), number).loss;
    EXPECT_NEAR(loss / plain_loss(c.config, plain_weights(c), c.batch.seq_len, c.batch.ids, c.batch.labels, dropout), 1,
                1e-5);
  }
}

// Whatever part loses its largest element is the worst.
TEST(PlainSlopes, ShowADroppedElementOfEveryPart) {
  for (const bool multi_query : {true, false}) {
    const Judged judged(small_case(alone(), 1, multi_query, false));
    std::int64_t elements = 0;
    for (const Part& part : judged.parts) {
      WholeTensors g = judged.gradient;
      float* largest = nullptr;
      for (const Part::Range& range : part.ranges) {
        elements += range.end - range.begin;
        for (std::int64_t e = range.begin; e < range.end; ++e) {
          float& x = g[range.parameter][static_cast<std::size_t>(e)];
          if (!largest || std::abs(x) > std::abs(*largest)) largest = &x;
        }
      }
      if (part.name.ends_with("not read") || part.name.ends_with("bias K")) continue;
      *largest = 0;
      const auto [error, worst] = worst_slope(judged.slopes, g);
      EXPECT_EQ(worst, part.name);
      EXPECT_GT(error, 1e-2) << part.name;
    }
    EXPECT_EQ(elements, small_case(alone(), 1, multi_query, false).config.parameters());
  }
}

// An attention whose output nothing reads: 0 is right there, and only there.
TEST(PlainSlopes, AloneSayWhereNoGradientIsRight) {
  VerifyCase c = small_case(alone(), 1);
  c.weights = [weights = c.weights, table = gpt_bigcode_table(c.config)](std::size_t i, std::int64_t first,
                                                                         std::int64_t count, float* out) {
    weights(i, first, count, out);
    if (table.parameters[i].name.ends_with("h.1.attn.c_proj.weight")) std::fill_n(out, count, 0.0f);
  };
  for (const Part& part : tensor_parts(c.config, c.batch.seq_len)) {
    const bool flat = plain_is_flat(c, part);
    bool unread = part.name.ends_with("not read");
    for (const char* name : {"h.1.attn.c_attn", "h.1.ln_1"}) unread |= part.name.find(name) != std::string::npos;
    if (unread || !part.name.ends_with("bias K")) {
      EXPECT_EQ(flat, unread) << part.name;
    }
  }
  World world;
  const Measured m = measure_alone(world.communicator(), c);
  for (const Figure& figure : Sheet(world.communicator()).exactly(c)(m))
    EXPECT_LE(std::abs(figure.value - figure.right), figure.tolerance) << figure.name;
  WholeTensors g = m.gradient;
  g[16][0] = 1e-6f;  // of that c_attn
  const Figures figures = Sheet(world.communicator()).exactly(c)({m.result, g, m.losses, ""});
  EXPECT_TRUE(std::isinf(figures[2].value)) << figures[2].name;
}

// In whichever tensor, and whatever the others are.
TEST(Sheet, WhatIsNoNumberIsOff) {
  World world;
  const VerifyCase c = small_case(alone(), 1);
  const Judge judge = Sheet(world.communicator()).exactly(c);
  const std::vector<Slopes> slopes = plain_slopes(c, {tensor_parts(c.config, c.batch.seq_len)[0]});
  const Measured m = measure_alone(world.communicator(), c);
  for (const std::size_t tensor : {std::size_t{0}, std::size_t{5}, m.gradient.size() - 1}) {
    Measured bad = m;
    bad.gradient[tensor][0] = std::nanf("");
    const Figures figures = judge(bad);
    EXPECT_TRUE(std::isnan(figures[0].value) || std::isnan(figures[1].value)) << tensor;
    EXPECT_TRUE(std::isnan(figures[2].value)) << tensor;
    EXPECT_EQ(std::isnan(worst_slope(slopes, bad.gradient).first), tensor == 0);
  }
}

}  // namespace
}  // namespace onescale

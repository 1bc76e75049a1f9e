#include "parallel/units.h"

#include <gtest/gtest.h>

#include <cmath>

#include "parallel/clip_norm.h"
#include "parallel/zero.h"

namespace onescale {
namespace {

ParameterTable odd_table() {
  ParameterTable table;
  table.parameters = {{"a", {7, 3}, 0}, {"b", {5}, 0}, {"c", {1}, 1}, {"d", {16}, 1}, {"e", {17, 2}, 2}};
  table.units = 3;
  return table;
}

TEST(FlatLayout, TensorsAreAlignedAndDoNotOverlap) {
  const ParameterTable table = odd_table();
  const FlatLayout layout(table);
  EXPECT_EQ(layout.unit_numel, (std::vector<std::int64_t>{48, 32, 48}));  // 21 -> 32, 5 -> 16; 1 -> 16, 16; 34 -> 48
  EXPECT_EQ(layout.offset, (std::vector<std::int64_t>{0, 32, 0, 16, 0}));
  EXPECT_EQ(layout.first_parameter, (std::vector<std::size_t>{0, 2, 4, 5}));
}

// One process: every stage is stage 0.
struct Alone {
  std::unique_ptr<Mesh> mesh = Mesh::single();
  Placement place{odd_table(), mesh->layout};
  std::unique_ptr<Device> device = make_cpu_device(2, false);
};

TEST(Zero, ViewsShareTheMasterInFloat32AndTheCopyInBfloat16) {
  const Alone alone;
  const auto f32 = make_weights(*alone.device, *alone.mesh, alone.place, {3, {}, DType::float32});
  const auto half = make_weights(*alone.device, *alone.mesh, alone.place, {3, {}, DType::bfloat16});
  EXPECT_EQ(f32->gather(0)[1].data, f32->master(0).data.as<float>() + 32);
  EXPECT_EQ(f32->gather(2)[0].describe(), "float32 [17, 2]");
  EXPECT_TRUE(f32->compute(0).empty());
  EXPECT_EQ(half->gather(0)[1].describe(), "bfloat16 [5]");
  EXPECT_EQ(alone.device->memory()[static_cast<std::size_t>(Kind::parameters)], 128 * 4 + 128 * (4 + 2));
}

TEST(Zero, GradientsAreOverwrittenFirstAndAddedToAfterClose) {
  const Alone alone;
  const auto gradients = make_gradients(*alone.device, *alone.mesh, alone.place, {});
  gradients->begin_step(2);
  EXPECT_EQ(gradients->open(1).write, Write::overwrite);
  EXPECT_EQ(gradients->open(1).write, Write::overwrite);  // the tied table is opened twice before it is closed
  gradients->close(1);
  EXPECT_EQ(gradients->open(1).write, Write::accumulate);
  EXPECT_EQ(gradients->open(0).write, Write::overwrite);
  gradients->begin_step(1);
  EXPECT_EQ(gradients->open(1).write, Write::overwrite);
}

TEST(ClipNorm, IsTheNormOfAllUnitsTogether) {
  const Alone alone;
  const auto gradients = make_gradients(*alone.device, *alone.mesh, alone.place, {});
  const Tensor scratch = alone.device->allocate(Kind::workspace, DType::float64, {1});
  const auto norm = [&] { return gradient_norm(*alone.device, *alone.mesh, alone.place, *gradients, scratch); };
  gradients->begin_step(1);
  gradients->open(0).tensors[0].as<float>()[20] = 3;  // 3-4-12: the norm is 13
  gradients->open(1).tensors[0].as<float>()[0] = -4;
  gradients->open(2).tensors[0].as<float>()[33] = 12;
  EXPECT_DOUBLE_EQ(norm(), 13);
  gradients->open(1).tensors[1].as<float>()[0] = NAN;
  EXPECT_TRUE(std::isnan(norm()));
}

TEST(ClipNorm, CoefficientActsOnlyAboveTheLimit) {
  EXPECT_DOUBLE_EQ(clip_coefficient(13, 1), 1.0 / 13);
  EXPECT_DOUBLE_EQ(clip_coefficient(13, 15), 1);
  EXPECT_DOUBLE_EQ(clip_coefficient(13, 13), 1);
  EXPECT_DOUBLE_EQ(clip_coefficient(13, 0), 1);  // off
  EXPECT_DOUBLE_EQ(clip_coefficient(0, 1), 1);
}

}  // namespace
}  // namespace onescale

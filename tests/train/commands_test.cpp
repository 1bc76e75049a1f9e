#include "train/commands.h"

#include "tests/temp_dir.h"
#include "tests/train/golden.h"

namespace onescale {
namespace {

TEST(GradientsCommandGolden, WritesLossNormGradientsAndLogits) {
  const TempDir scratch;
  for (const char* name : {"mqa", "mha"}) {
    const Golden golden(name);
    Options options;
    options.model = golden.dir;
    options.batch = golden.dir + "/batch.safetensors";
    options.out = scratch / (std::string(name) + ".safetensors");
    options.logits = true;
    options.isa = test_isa();
    options.micro_batch = 0;
    World world;
    ASSERT_EQ(gradients_command(options, world), 0);
    const SafetensorsReader file(options.out);
    for (const StoredTensor& expected : golden.expect.tensors()) {
      if (expected.name == "token_nll") continue;
      const StoredTensor& got = file.at(expected.name);
      ASSERT_EQ(got.shape, expected.shape) << expected.name;
      if (expected.name == "good_tokens") {
        EXPECT_EQ(Golden::ids(file, expected.name), Golden::ids(golden.expect, expected.name));
        continue;
      }
      std::vector<float> values(static_cast<std::size_t>(got.numel()));
      file.read(got, 0, got.numel(), values.data());
      const Difference d = difference(values, golden.values(expected.name));
      EXPECT_LT(d.relative_l2, 1e-5) << expected.name;  // float32 against float64
      EXPECT_NEAR(d.ratio, 1, 1e-5) << expected.name;
    }
  }
}

// What is exported as float32 reads back equal; as bfloat16, within its rounding; a directory that exists is not
// touched.
TEST(ExportCommand, ModelsReadBack) {
  const TempDir scratch;
  const Golden golden("mqa");
  for (const char* dtype : {"float32", "bfloat16"}) {
    Options options;
    options.model = golden.dir;
    options.out = scratch / dtype;
    options.dtype = dtype;
    ASSERT_EQ(export_command(options), 0);
    EXPECT_THROW(export_command(options), UsageError);
    const ModelSource copy(options.out);
    EXPECT_EQ(config_json(copy.config()), config_json(golden.source.config()));
    const SafetensorsReader file(options.out + "/model.safetensors");
    for (const StoredTensor& tensor : file.tensors())
      EXPECT_EQ(tensor.type, std::string(dtype) == "float32" ? FileType::F32 : FileType::BF16) << tensor.name;
    for (std::size_t i = 0; i < copy.table().parameters.size(); ++i) {
      std::vector<float> a(static_cast<std::size_t>(copy.table().parameters[i].numel())), b(a.size());
      const auto n = static_cast<std::int64_t>(a.size());
      copy.read(i, 0, n, a.data());
      golden.source.read(i, 0, n, b.data());
      for (std::size_t e = 0; e < a.size(); ++e) {
        EXPECT_LE(std::abs(a[e] - b[e]), (std::string(dtype) == "float32" ? 0 : std::abs(b[e]) / 256)) << e;
      }
    }
  }
}

}  // namespace
}  // namespace onescale

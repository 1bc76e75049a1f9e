#include "model/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "model/hf_files.h"
#include "model/parameters.h"
#include "parallel/zero.h"
#include "tests/levels.h"

namespace onescale {
namespace {

struct Model {
  explicit Model(const std::string& name, DType dtype = DType::float32)
      : dir(std::string(FIXTURES) + "/golden/" + name),
        config(read_config(dir + "/config.json")),
        table(gpt_bigcode_table(config)),
        mesh(Mesh::single()),
        place(table, mesh->layout),
        device(make_cpu_device(2, false, test_isa())),
        weights(make_weights(*device, *mesh, place, {0, {}, dtype})),
        model(*device, *mesh, config, SpMode::ulysses, 1, 16, dtype, Recompute::none, false) {
    const ModelReader reader(dir, config, table);
    for (std::size_t i = 0; i < table.parameters.size(); ++i) {
      std::vector<float> w(static_cast<std::size_t>(table.parameters[i].numel()));
      reader.read(i, 0, table.parameters[i].numel(), w.data());
      const std::int64_t at = place.flat.offset[i];
      device->upload(weights->master(table.parameters[i].unit).data.slice(0, at, at + table.parameters[i].numel()),
                     w.data());
    }
  }
  std::string dir;
  ModelConfig config;
  ParameterTable table;
  std::unique_ptr<Mesh> mesh;
  Placement place;
  std::unique_ptr<Device> device;
  std::unique_ptr<Weights> weights;
  GptBigCode model;
};

std::vector<std::int32_t> read_ids(const SafetensorsReader& file, const std::string& name) {
  const StoredTensor& t = file.at(name);
  std::vector<std::int64_t> wide(static_cast<std::size_t>(t.numel()));
  file.read(t, 0, t.numel(), wide.data());
  return {wide.begin(), wide.end()};
}

TEST(DecoderGolden, GreedyContinuationsAreThoseOfTransformers) {
  Model model("greedy");
  const SafetensorsReader expect(model.dir + "/expect.safetensors");
  Decoder decoder(model.model, 48);
  for (int i = 0; i < 3; ++i) {
    const std::vector<std::int32_t> prompt = read_ids(expect, "prompt_" + std::to_string(i));
    const std::vector<std::int32_t> wanted = read_ids(expect, "continuation_" + std::to_string(i));
    decoder.reset();
    std::vector<std::int32_t> got;
    std::span<const std::int32_t> next = prompt;
    while (got.size() < wanted.size()) {
      const std::vector<float>& logits = decoder.append(next, *model.weights);
      got.push_back(static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      next = std::span<const std::int32_t>(&got.back(), 1);
    }
    EXPECT_EQ(got, wanted) << "prompt " << i;
  }
}

// Logits do not depend on how the sequence is handed in: whole, token by token, or in pieces.
TEST(DecoderGolden, LogitsAreThoseOfTheWholeSequence) {
  for (const char* name : {"mqa", "mha"}) {
    Model model(name);
    const SafetensorsReader batch(model.dir + "/batch.safetensors"), expect(model.dir + "/expect.safetensors");
    const std::int64_t T = batch.at("input_ids").shape[1], V = model.config.vocab_size;
    const std::vector<std::int32_t> ids = read_ids(batch, "input_ids");
    std::vector<double> logits(static_cast<std::size_t>(expect.at("logits").numel()));
    expect.read(expect.at("logits"), 0, expect.at("logits").numel(), logits.data());
    Decoder decoder(model.model, T);
    for (const std::int64_t piece : {std::int64_t{1}, std::int64_t{5}, T}) {
      decoder.reset();
      for (std::int64_t begin = 0; begin < T; begin += piece) {
        const std::int64_t end = std::min(begin + piece, T);
        const std::vector<float>& got = decoder.append(
            std::span(ids).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)),
            *model.weights);
        double error = 0, square = 0;
        for (std::int64_t v = 0; v < V; ++v) {
          const double ref = logits[static_cast<std::size_t>((end - 1) * V + v)], x = got[static_cast<std::size_t>(v)];
          error += (x - ref) * (x - ref);
          square += ref * ref;
        }
        EXPECT_LT(std::sqrt(error / square), 1e-5)
            << name << " piece " << piece << " end " << end;  // float32 against float64
      }
    }
  }
}

}  // namespace
}  // namespace onescale

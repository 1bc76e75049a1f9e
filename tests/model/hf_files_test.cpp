#include "model/hf_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <set>

#include "model/half.h"
#include "model/parameters.h"
#include "parallel/json.h"
#include "tests/model/half_bits.h"
#include "tests/temp_dir.h"

namespace onescale {
namespace {

ModelConfig small(bool tied = true) {
  ModelConfig c{.vocab_size = 17, .n_positions = 5, .n_embd = 12, .n_layer = 2, .n_head = 3, .n_inner = 7};
  c.tie_word_embeddings = tied;
  c.bos_token_id = c.eos_token_id = 0;
  return c;
}

// Element i of parameter p, some value of its own.
float value(std::size_t p, std::int64_t i) {
  return std::sin(static_cast<float>(p) * 100 + static_cast<float>(i));
}

Gather fetch_of(const ParameterTable& table) {
  return [&table](const std::vector<std::int64_t>& wanted, float* out) {
    const auto p = static_cast<std::size_t>(wanted[0]);
    for (std::int64_t i = 0; i < table.parameters[p].numel(); ++i) out[i] = value(p, i);
  };
}

// Writes the tensors of the table, their names changed by `rename` (an empty name: left out), with more behind them.
void write_as(const std::string& path, const ParameterTable& table, FileType type,
              std::string (*rename)(const std::string&), const std::vector<StoredTensor>& more = {}) {
  std::vector<StoredTensor> list;
  for (const Parameter& p : table.parameters) {
    if (!rename(p.name).empty()) list.push_back({rename(p.name), type, p.shape});
  }
  list.insert(list.end(), more.begin(), more.end());
  SafetensorsWriter writer(path, list);
  for (std::size_t p = 0; p < table.parameters.size(); ++p) {
    if (rename(table.parameters[p].name).empty()) continue;
    std::vector<float> values(static_cast<std::size_t>(table.parameters[p].numel()));
    fetch_of(table)({static_cast<std::int64_t>(p)}, values.data());
    if (type != FileType::F16) {
      writer.write(values.data(), table.parameters[p].numel());
      continue;
    }
    std::vector<std::uint16_t> bits(values.size());
    std::transform(values.begin(), values.end(), bits.begin(), half_bits);
    writer.write_bytes(bits.data(), table.parameters[p].numel() * 2);
  }
  for (const StoredTensor& t : more) {
    const std::vector<char> zeros(static_cast<std::size_t>(t.bytes()));
    writer.write_bytes(zeros.data(), t.bytes());
  }
  writer.close();
}

std::string same(const std::string& name) {
  return name;
}
std::string without_prefix(const std::string& name) {
  return name.starts_with("transformer.") ? name.substr(12) : name;
}

void expect_weights(const ModelReader& reader, const ParameterTable& table, float (*round)(float)) {
  for (std::size_t p = 0; p < table.parameters.size(); ++p) {
    const std::int64_t n = table.parameters[p].numel();
    std::vector<float> values(static_cast<std::size_t>(n));
    reader.read(p, 0, n, values.data());
    for (std::int64_t i = 0; i < n; ++i)
      ASSERT_EQ(values[static_cast<std::size_t>(i)], round(value(p, i))) << table.parameters[p].name;
    reader.read(p, n - 3, 2, values.data());  // a shard's range
    ASSERT_EQ(values[0], round(value(p, n - 3)));
  }
}

float exact(float x) {
  return x;
}
float through_bf16(float x) {
  return float_of_bfloat16(bfloat16_of_float(x));
}
float through_half(float x) {
  return float_of_half(half_bits(x));
}

TEST(HfFiles, WritesWhatReadsBackInOneFileOrMany) {
  for (bool tied : {true, false}) {
    for (std::int64_t limit : {max_file_bytes, std::int64_t{1500}, std::int64_t{1}}) {
      const TempDir dir;
      const ModelConfig config = small(tied);
      const ParameterTable table = gpt_bigcode_table(config);
      const auto sums = write_model(dir.path(), config, table, fetch_of(table), FileType::F32,
                                    *make_single_communicator("world"), limit);
      EXPECT_EQ(sums.size(), table.parameters.size());
      const bool index = std::filesystem::exists(dir / "model.safetensors.index.json");
      EXPECT_EQ(index, limit != max_file_bytes);
      EXPECT_EQ(std::filesystem::exists(dir / "model.safetensors"), !index);
      const ModelReader reader(dir.path(), read_config(dir.path()), table);
      EXPECT_TRUE(reader.warnings().empty());
      expect_weights(reader, table, exact);
      if (index) {
        const Json json = Json::read_file(dir / "model.safetensors.index.json");
        EXPECT_EQ(json.at("metadata").at("total_size").integer(), table.numel() * 4);
        EXPECT_EQ(json.at("weight_map").size(), static_cast<std::int64_t>(table.parameters.size()));
        EXPECT_EQ(json.at("weight_map").has("lm_head.weight"), !tied);
        EXPECT_TRUE(json.at("weight_map").at("transformer.wte.weight").string().starts_with("model-00001-of-"));
        for (const auto& entry :
             std::filesystem::directory_iterator(dir.path())) {  // a larger tensor has a file of its own
          if (entry.path().extension() != ".safetensors") continue;
          const SafetensorsReader file(entry.path().string());
          std::int64_t bytes = 0;
          for (const StoredTensor& t : file.tensors()) bytes += t.bytes();
          EXPECT_TRUE(bytes <= limit || file.tensors().size() == 1);
        }
      }
    }
  }
}

// Two files of every one of a thousand ranks would be more than a process may hold open.
TEST(HfFiles, ManyRanksWriteNoMoreFilesThanAReaderCanOpen) {
  std::vector<StoredTensor> tensors;
  for (int i = 0; i < 1000; ++i) tensors.push_back({str("t", i), FileType::F32, {2}});
  const TempDir dir;
  std::set<std::size_t> writers;
  const Gather gather = [&](const std::vector<std::int64_t>& wanted, float*) {
    for (std::size_t r = 0; r < wanted.size(); ++r) {
      if (wanted[r] >= 0) writers.insert(r);
    }
  };
  write_tensors(dir.path(), "model", tensors, gather, *make_recording_communicator("world", 0, 1000));
  EXPECT_EQ(writers.size(), 125u);  // 8 tensors each
  EXPECT_EQ(*writers.rbegin(), 992u);
  const Json map = Json::read_file(dir / "model.safetensors.index.json").at("weight_map");
  std::set<std::string> files;
  for (const auto& [name, file] : map.items()) files.insert(file.string());
  EXPECT_EQ(files.size(), writers.size());
}

TEST(HfFiles, ReadsEveryTypeWithAndWithoutPrefix) {
  const ModelConfig config = small();
  const ParameterTable table = gpt_bigcode_table(config);
  const std::vector<std::pair<FileType, float (*)(float)>> types = {
      {FileType::F32, exact}, {FileType::BF16, through_bf16}, {FileType::F16, through_half}};
  for (const auto& [type, round] : types) {
    for (auto rename : {same, without_prefix}) {
      const TempDir dir;
      write_as(dir / "model.safetensors", table, type, rename,
               {{"transformer.bias", FileType::BOOL, {4}},
                {"transformer.h.0.attn.bias", FileType::U8, {1, 1, 3, 3}},
                {"h.1.attn.masked_bias", FileType::F32, {}}});
      expect_weights(ModelReader(dir.path(), config, table), table, round);
    }
  }
}

TEST(HfFiles, ReadsTransformersGolden) {
  for (const char* name : {"mqa", "mha", "erf_noscale", "wide_mqa", "wide_mha", "steps", "greedy"}) {
    const std::string dir = std::string(FIXTURES "/golden/") + name;
    const ModelConfig config = read_config(dir);
    const ParameterTable table = gpt_bigcode_table(config);
    EXPECT_TRUE(ModelReader(dir, config, table).warnings().empty());
    const SafetensorsReader file(dir + "/model.safetensors");
    EXPECT_EQ(file.tensors().size(), table.parameters.size());
  }
}

TEST(HfFiles, TheHeadOfATiedModelMayBeThere) {
  const ModelConfig config = small();
  const ParameterTable table = gpt_bigcode_table(config), untied = gpt_bigcode_table(small(false));
  const std::size_t head = untied.parameters.size() - 1;
  for (bool equal : {true, false}) {
    const TempDir dir;
    const Gather values = [&](const std::vector<std::int64_t>& wanted, float* out) {
      const auto p = static_cast<std::size_t>(wanted[0]);
      for (std::int64_t i = 0; i < untied.parameters[p].numel(); ++i) out[i] = value(p == head && equal ? 0 : p, i);
    };
    write_tensors(dir.path(), "model", model_tensors(untied, FileType::F32), values,
                  *make_single_communicator("world"));
    const ModelReader reader(dir.path(), config, table);
    EXPECT_EQ(reader.warnings().size(), equal ? 0u : 1u);
    expect_weights(reader, table, exact);
    expect_weights(ModelReader(dir.path(), small(false), untied), table, exact);
  }
  // An index may name the head though no file holds it.
  const TempDir dir;
  write_model(dir.path(), config, table, fetch_of(table), FileType::F32, *make_single_communicator("world"), 1500);
  Json index = Json::read_file(dir / "model.safetensors.index.json"), map = index.at("weight_map");
  map.set("lm_head.weight", map.at("transformer.wte.weight").string());
  write_text(dir / "model.safetensors.index.json", index.dump());
  EXPECT_EQ(sentence([&] { ModelReader(dir.path(), config, table); }), "");
  EXPECT_NE(sentence([&] { ModelReader(dir.path(), small(false), untied); }).find("missing: lm_head.weight"),
            std::string::npos);
}

TEST(HfFiles, EveryWrongTensorIsNamed) {
  const ModelConfig config = small();
  const ParameterTable table = gpt_bigcode_table(config);
  const TempDir dir;
  auto rename = [](const std::string& name) {
    if (name == "transformer.wpe.weight" || name == "transformer.h.1.mlp.c_fc.bias") return std::string();
    return name == "transformer.h.0.ln_1.bias" ? std::string("transformer.h.0.ln_9.bias") : name;
  };
  write_as(dir / "model.safetensors", table, FileType::F32, rename,
           {{"transformer.wpe.weight", FileType::F32, {12, 5}}});
  const std::string said = sentence([&] { ModelReader(dir.path(), config, table); });
  EXPECT_NE(said.find("missing: transformer.h.0.ln_1.bias, transformer.h.1.mlp.c_fc.bias"), std::string::npos) << said;
  EXPECT_NE(said.find("unexpected: transformer.h.0.ln_9.bias"), std::string::npos) << said;
  EXPECT_NE(said.find("transformer.wpe.weight F32 [12, 5] for transformer.wpe.weight F32 [5, 12]"), std::string::npos)
      << said;

  write_as(dir / "model.safetensors", table, FileType::F32, same, {{"wte.weight", FileType::F32, {17, 12}}});
  EXPECT_NE(sentence([&] { ModelReader(dir.path(), config, table); }).find("transformer.wte.weight twice"),
            std::string::npos);
  std::filesystem::remove(dir / "model.safetensors");
  EXPECT_NE(sentence([&] { ModelReader(dir.path(), config, table); }).find("has neither model.safetensors nor"),
            std::string::npos);
  write_model(dir.path(), config, table, fetch_of(table), FileType::F32, *make_single_communicator("world"), 1500);
  const Json map = Json::read_file(dir / "model.safetensors.index.json").at("weight_map");
  const std::string file = map.at("transformer.h.0.attn.c_attn.weight").string();
  std::filesystem::remove(dir / file);
  EXPECT_NE(sentence([&] { ModelReader(dir.path(), config, table); }).find(file + ": there is no such file"),
            std::string::npos);
  write_text(dir / "model.safetensors.index.json", R"({"weight_map": {"a": "../x.safetensors"}})");
  EXPECT_NE(sentence([&] { ModelReader(dir.path(), config, table); }).find("no file name of its directory"),
            std::string::npos);
}

}  // namespace
}  // namespace onescale

#include "model/config.h"

#include <gtest/gtest.h>

#include <fstream>

#include "parallel/json.h"
#include "tests/temp_dir.h"

namespace onescale {
namespace {

// Reads {"model_type": "gpt_bigcode", <fields>}.
ModelConfig read(const std::string& fields) {
  const TempDir dir;
  const std::string path = dir / "config_test.json";
  std::ofstream(path) << R"({"model_type": "gpt_bigcode")" << (fields.empty() ? "" : ", ") << fields << "}";
  return read_config(path);
}

void expect_equal(const ModelConfig& a, const ModelConfig& b) {
  EXPECT_EQ(a.vocab_size, b.vocab_size);
  EXPECT_EQ(a.n_positions, b.n_positions);
  EXPECT_EQ(a.n_embd, b.n_embd);
  EXPECT_EQ(a.n_layer, b.n_layer);
  EXPECT_EQ(a.n_head, b.n_head);
  EXPECT_EQ(a.n_inner, b.n_inner);
  EXPECT_EQ(a.multi_query, b.multi_query);
  EXPECT_EQ(a.gelu, b.gelu);
  EXPECT_EQ(a.scale_attn_weights, b.scale_attn_weights);
  EXPECT_EQ(a.layer_norm_epsilon, b.layer_norm_epsilon);
  EXPECT_EQ(a.initializer_range, b.initializer_range);
  EXPECT_EQ(a.embd_pdrop, b.embd_pdrop);
  EXPECT_EQ(a.resid_pdrop, b.resid_pdrop);
  EXPECT_EQ(a.attn_pdrop, b.attn_pdrop);
  EXPECT_EQ(a.tie_word_embeddings, b.tie_word_embeddings);
  EXPECT_EQ(a.bos_token_id, b.bos_token_id);
  EXPECT_EQ(a.eos_token_id, b.eos_token_id);
}

// Defaults of transformers' GPTBigCodeConfig (reference/gptbigcode.md 1.1).
TEST(Config, AbsentFieldsHaveTransformersDefaults) {
  const ModelConfig c = read("");
  EXPECT_EQ(c.vocab_size, 50257);
  EXPECT_EQ(c.n_positions, 1024);
  EXPECT_EQ(c.n_embd, 768);
  EXPECT_EQ(c.n_layer, 12);
  EXPECT_EQ(c.n_head, 12);
  EXPECT_EQ(c.n_inner, 3072);
  EXPECT_TRUE(c.multi_query && c.scale_attn_weights && c.tie_word_embeddings && c.gelu == Gelu::tanh);
  EXPECT_EQ(c.layer_norm_epsilon, 1e-5f);
  EXPECT_EQ(c.initializer_range, 0.02f);
  EXPECT_TRUE(c.embd_pdrop == 0.1f && c.resid_pdrop == 0.1f && c.attn_pdrop == 0.1f);
  EXPECT_EQ(c.bos_token_id, 50256);
  EXPECT_EQ(c.eos_token_id, 50256);
}

TEST(Config, ReadsTheFilesOfTransformersGolden) {
  const ModelConfig mqa = read_config(FIXTURES "/golden/mqa");  // a directory
  EXPECT_EQ(mqa.vocab_size, 99);
  EXPECT_EQ(mqa.n_embd, 48);
  EXPECT_EQ(mqa.n_inner, 37);
  EXPECT_EQ(mqa.n_layer, 3);
  EXPECT_EQ(mqa.n_head, 4);
  EXPECT_EQ(mqa.attn_pdrop, 0);
  EXPECT_EQ(mqa.eos_token_id, 0);
  EXPECT_TRUE(mqa.multi_query);
  EXPECT_FALSE(read_config(FIXTURES "/golden/mha/config.json").multi_query);
  const ModelConfig erf = read_config(FIXTURES "/golden/erf_noscale/config.json");
  EXPECT_EQ(erf.gelu, Gelu::erf);
  EXPECT_FALSE(erf.scale_attn_weights);
  EXPECT_EQ(erf.layer_norm_epsilon, 1e-3f);
  EXPECT_EQ(erf.n_inner, 4 * 48);
}

TEST(Config, BothNamesOfAnAliasAreRead) {
  const ModelConfig c =
      read(R"("hidden_size": 48, "max_position_embeddings": 7, "num_hidden_layers": 2, "num_attention_heads": 6)");
  EXPECT_EQ(c.n_embd, 48);
  EXPECT_EQ(c.n_positions, 7);
  EXPECT_EQ(c.n_layer, 2);
  EXPECT_EQ(c.n_head, 6);
  EXPECT_EQ(read(R"("hidden_size": 48, "n_embd": 48)").n_embd, 48);
}

TEST(Config, WritesWhatReadsBackEqual) {
  ModelConfig c;
  c = {.vocab_size = 99,
       .n_positions = 64,
       .n_embd = 48,
       .n_layer = 3,
       .n_head = 4,
       .n_inner = 37,
       .multi_query = false,
       .gelu = Gelu::erf,
       .scale_attn_weights = false,
       .layer_norm_epsilon = 1e-6f,
       .initializer_range = 0.0127f,
       .embd_pdrop = 0.1f,
       .resid_pdrop = 0,
       .attn_pdrop = 1.0f / 3,
       .tie_word_embeddings = false,
       .bos_token_id = -1,
       .eos_token_id = 98};
  for (int i = 0; i < 2; ++i) {
    const TempDir dir;
    const std::string path = dir / "config.json", text = config_json(c, "bfloat16");
    std::ofstream(path) << text;
    expect_equal(read_config(path), c);
    const Json json = Json::parse(text, "config.json");
    EXPECT_EQ(json.at("architectures").at(0).string(), "GPTBigCodeForCausalLM");
    EXPECT_EQ(json.at("model_type").string(), "gpt_bigcode");
    EXPECT_EQ(json.at("dtype").string(), "bfloat16");
    EXPECT_EQ(json.at("embd_pdrop").number(), i ? 0.5 : 0.1);  // not 0.10000000149
    c = ModelConfig{.n_inner = 3072, .embd_pdrop = 0.5f};
  }
}

TEST(Config, TheActivationNamesOfTransformers) {
  for (const char* name : {"gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"}) {
    EXPECT_EQ(read(str("\"activation_function\": \"", name, "\"")).gelu, Gelu::tanh);
  }
  for (const char* name : {"gelu", "gelu_python"})
    EXPECT_EQ(read(str("\"activation_function\": \"", name, "\"")).gelu, Gelu::erf);
}

TEST(Config, FieldsThatChangeNoNumberAreIgnored) {
  EXPECT_EQ(
      read(
          R"("attention_softmax_in_fp32": false, "scale_attention_softmax_in_fp32": false, "use_cache": false, "summary_type": 3,
                    "inference_runner": 0, "torch_dtype": "float16", "attention_type": 2, "num_key_value_heads": null, "n_inner": null, "x": [1])")
          .n_inner,
      3072);
}

TEST(Config, KeyValueHeadsSayWhatMultiQuerySays) {
  EXPECT_TRUE(read(R"("num_key_value_heads": 1)").multi_query);
  EXPECT_FALSE(read(R"("multi_query": false, "num_key_value_heads": 12)").multi_query);
}

TEST(Config, TokenIds) {
  EXPECT_EQ(read(R"("eos_token_id": [3, 5], "bos_token_id": null)").eos_token_id, 3);
  EXPECT_EQ(read(R"("eos_token_id": [3, 5], "bos_token_id": null)").bos_token_id, -1);
  EXPECT_EQ(read(R"("vocab_size": 99, "eos_token_id": 50256)").eos_token_id, -1);  // no such token can come
}

TEST(Config, RefusesByNameAndValue) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {R"("hidden_size": 64, "n_embd": 48)", {"n_embd is 48", "hidden_size", "64"}},
      {R"("activation_function": "relu")", {"activation_function is \"relu\""}},
      {R"("activation_function": "quick_gelu")", {"quick_gelu"}},
      {R"("add_cross_attention": true)", {"add_cross_attention"}},
      {R"("quantization_config": {"bits": 4})", {"quantization_config"}},
      {R"("n_embd": 768, "n_head": 7)", {"n_head is 7", "768", "6 and 8"}},
      {R"("n_embd": 13, "n_head": 20)", {"n_head is 20", "13", "13"}},
      {R"("num_key_value_heads": 4)", {"num_key_value_heads is 4", "multi_query true", "1"}},
      {R"("multi_query": false, "num_key_value_heads": 1)", {"num_key_value_heads is 1", "12"}},
      {R"("n_layer": "12")", {"n_layer is \"12\""}},
      {R"("n_layer": 1.5)", {"n_layer is 1.5"}},
      {R"("n_layer": 0)", {"n_layer is 0"}},
      {R"("n_layer": null)", {"n_layer is null"}},
      {R"("n_embd": -48)", {"n_embd is -48"}},
      {R"("n_inner": 0)", {"n_inner is 0", "from 1"}},
      {R"("n_positions": 9223372036854775807)", {"n_positions is 9223372036854775807"}},
      {R"("n_embd": 9223372036854775807)", {"n_embd is 9223372036854775807"}},
      {R"("vocab_size": 18446744073709551615)", {"vocab_size is 18446744073709551615"}},
      {R"("n_embd": 268435456, "n_head": 1, "vocab_size": 2147483647)", {"n_embd 268435456", "parameters"}},
      {R"("attn_pdrop": 1.0)", {"attn_pdrop is 1"}},
      {R"("embd_pdrop": -0.1)", {"embd_pdrop is -0.1"}},
      {R"("resid_pdrop": "none")", {"resid_pdrop is \"none\""}},
      {R"("layer_norm_epsilon": 0)", {"layer_norm_epsilon is 0"}},
      {R"("initializer_range": 1e300)", {"initializer_range is inf"}},
      {R"("multi_query": 1)", {"multi_query is 1", "true or false"}},
      {R"("tie_word_embeddings": "yes")", {"tie_word_embeddings is \"yes\""}},
      {R"("eos_token_id": "</s>")", {"eos_token_id is \"</s>\""}},
  };
  for (const auto& [fields, parts] : cases) {
    try {
      read(fields);
      ADD_FAILURE() << "accepted: " << fields;
    } catch (const Error& e) {
      for (const std::string& part : parts)
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << fields << "\n" << e.what();
      EXPECT_NE(std::string(e.what()).find("config_test.json"), std::string::npos) << e.what();
    }
  }
  const TempDir dir;
  const std::string path = dir / "other.json";
  std::ofstream(path) << R"({"model_type": "gpt2"})";
  EXPECT_THROW(read_config(path), UsageError);
  std::ofstream(path) << R"({"n_embd": 48})";
  EXPECT_THROW(read_config(path), UsageError);
}

}  // namespace
}  // namespace onescale

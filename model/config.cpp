#include "model/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include "kernels/error.h"
#include "kernels/philox.h"
#include "parallel/json.h"

namespace onescale {
namespace {

// Ids are int32; layers, heads and positions must fit in the key of a dropout draw.
constexpr std::int64_t int32_max = std::numeric_limits<std::int32_t>::max();

struct Size {
  const char *name, *alias;
  std::int64_t ModelConfig::*member;
  std::int64_t most;
};
constexpr Size sizes[] = {{"vocab_size", "", &ModelConfig::vocab_size, int32_max},
                          {"n_positions", "max_position_embeddings", &ModelConfig::n_positions, DrawLimits::keys},
                          {"n_embd", "hidden_size", &ModelConfig::n_embd, int32_max},
                          {"n_layer", "num_hidden_layers", &ModelConfig::n_layer, DrawLimits::layers},
                          {"n_head", "num_attention_heads", &ModelConfig::n_head, DrawLimits::heads},
                          {"n_inner", "", &ModelConfig::n_inner, int32_max}};

struct Number {
  const char* name;
  float ModelConfig::*member;
  const char* range;
  bool (*fits)(float);
};
bool is_share(float p) {
  return p >= 0 && p < 1;
}
constexpr Number numbers[] = {
    {"layer_norm_epsilon", &ModelConfig::layer_norm_epsilon, "above 0", [](float x) { return x > 0; }},
    {"initializer_range", &ModelConfig::initializer_range, "0 or above", [](float x) { return x >= 0; }},
    {"embd_pdrop", &ModelConfig::embd_pdrop, "from 0 to below 1", is_share},
    {"resid_pdrop", &ModelConfig::resid_pdrop, "from 0 to below 1", is_share},
    {"attn_pdrop", &ModelConfig::attn_pdrop, "from 0 to below 1", is_share}};

constexpr std::pair<const char*, bool ModelConfig::*> flags[] = {
    {"multi_query", &ModelConfig::multi_query},
    {"scale_attn_weights", &ModelConfig::scale_attn_weights},
    {"tie_word_embeddings", &ModelConfig::tie_word_embeddings}};

constexpr std::pair<const char*, std::int64_t ModelConfig::*> tokens[] = {{"bos_token_id", &ModelConfig::bos_token_id},
                                                                          {"eos_token_id", &ModelConfig::eos_token_id}};

bool given(const Json& json, const std::string& name) {
  return json.has(name) && !json.at(name).is_null();
}

// A size that has two names may be given by both if they agree. n_inner alone may be null, for 4 * n_embd.
void read_size(ModelConfig& config, const Json& json, const Size& size, const std::string& path) {
  const bool aliased = json.has(size.alias), named = json.has(size.name);
  check_usage(!aliased || !named || json.at(size.name).dump() == json.at(size.alias).dump(), path, ": ", size.name,
              " is ", named ? json.at(size.name).dump() : "", " but ", size.alias, ", another name of it, is ",
              aliased ? json.at(size.alias).dump() : "", "; remove one of them");
  std::int64_t& out = config.*size.member;
  if (size.member == &ModelConfig::n_inner && !given(json, size.name))
    out = 4 * std::clamp<std::int64_t>(config.n_embd, 0, int32_max);
  else if (aliased || named)
    out = json.at(aliased ? size.alias : size.name).integer();
}

// null: none; a list: newer generation settings have several, the first is the one that ends a document. An id that the
// vocabulary lacks can neither end nor begin anything: transformers writes its default 50256 beside any vocab_size.
void read_token(std::int64_t& out, const Json& json, const std::string& name, std::int64_t vocab_size) {
  if (json.has(name)) {
    Json value = json.at(name);
    if (value.is_array() && value.size() > 0) value = value.at(0);
    out = value.is_null() ? -1 : value.integer();
  }
  if (out < 0 || out >= vocab_size) out = -1;
}

// The names in transformers' ACT2FN that are one of the two forms.
Gelu read_activation(const std::string& path, const std::string& name) {
  for (const char* known : {"gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"}) {
    if (name == known) return Gelu::tanh;
  }
  check_usage(name == "gelu" || name == "gelu_python", path, ": activation_function is \"", name,
              "\", but only the tanh form (gelu_pytorch_tanh, gelu_new, gelu_fast) and the erf form (gelu) are known");
  return Gelu::erf;
}

// The double that a float's shortest decimal form names, so that 1e-5f is written as 1e-05.
double shortest(float value) {
  char text[32];
  double out = 0;
  std::from_chars(text, std::to_chars(text, text + sizeof text, value).ptr, out);
  return out;
}

}  // namespace

ModelShard::ModelShard(const ModelConfig& config, int tp, int tp_rank)
    : heads(config.n_head / tp),
      first_head(heads * tp_rank),
      kv_heads(config.multi_query ? 1 : heads),
      width(heads * config.head_size()),
      qkv(width + 2 * kv_heads * config.head_size()),
      inner(config.n_inner / tp),
      vocab((config.vocab_size + tp - 1) / tp),
      first_id(vocab * tp_rank),
      ids(std::clamp(config.vocab_size - first_id, std::int64_t{0}, vocab)),
      attention_scale(
          config.scale_attn_weights ? static_cast<float>(1 / std::sqrt(static_cast<double>(config.head_size()))) : 1) {}

ModelConfig read_config(const std::string& path_or_dir) {
  std::error_code ignored;
  const bool is_dir = std::filesystem::is_directory(path_or_dir, ignored);
  const std::string path = is_dir ? (std::filesystem::path(path_or_dir) / "config.json").string() : path_or_dir;
  const Json json = Json::read_file(path);
  const std::string type = json.has("model_type") ? json.at("model_type").string() : "";
  check_usage(type == "gpt_bigcode", path, ": model_type is \"", type,
              "\", but only \"gpt_bigcode\" can be trained; convert the model");
  check_usage(!given(json, "add_cross_attention") || !json.at("add_cross_attention").boolean(), path,
              ": add_cross_attention is true, but only decoders without it can be trained; convert the model");
  check_usage(
      !given(json, "quantization_config"), path,
      ": quantization_config is set, but weights must be F32, BF16 or F16; save the model without quantization");

  ModelConfig config;
  for (const Size& size : sizes) read_size(config, json, size, path);
  for (const Number& number : numbers) {
    if (json.has(number.name)) config.*number.member = static_cast<float>(json.at(number.name).number());
  }
  for (const auto& [name, member] : flags) {
    if (json.has(name)) config.*member = json.at(name).boolean();
  }
  for (const auto& [name, member] : tokens) read_token(config.*member, json, name, config.vocab_size);
  if (json.has("activation_function")) config.gelu = read_activation(path, json.at("activation_function").string());
  if (given(json, "num_key_value_heads")) {  // what multi_query says in other words
    const std::int64_t heads = json.at("num_key_value_heads").integer();
    check_usage(heads == config.kv_heads(), path, ": num_key_value_heads is ", heads, ", but multi_query ",
                config.multi_query ? "true" : "false", " with n_head ", config.n_head, " means ", config.kv_heads(),
                "; the model has one K/V head or one per head, so remove the field or set it to that");
  }
  check_config(config, path);
  return config;
}

std::string config_json(const ModelConfig& config, const std::string& dtype) {
  Json json = Json::object(), architectures = Json::array();
  architectures.push("GPTBigCodeForCausalLM");
  json.set("architectures", architectures);
  json.set("model_type", "gpt_bigcode");
  for (const Size& size : sizes) json.set(size.name, config.*size.member);
  for (const auto& [name, member] : flags) json.set(name, config.*member);
  json.set("activation_function", config.gelu == Gelu::tanh ? "gelu_pytorch_tanh" : "gelu");
  for (const Number& number : numbers) json.set(number.name, shortest(config.*number.member));
  for (const auto& [name, member] : tokens)
    json.set(name, config.*member < 0 ? Json::Scalar(nullptr) : Json::Scalar(config.*member));
  json.set("dtype", dtype);
  return json.dump(2) + "\n";
}

void check_config(const ModelConfig& config, const std::string& where) {
  for (const Size& size : sizes) {
    const std::int64_t value = config.*size.member;
    check_usage(value >= 1 && value <= size.most, where, ": ", size.name, " is ", value, ", it must be from 1 to ",
                size.most);
  }
  if (config.n_embd % config.n_head != 0) {
    std::int64_t below = config.n_head, above = config.n_head;
    while (config.n_embd % below != 0) --below;
    while (above < config.n_embd && config.n_embd % above != 0) ++above;
    check_usage(false, where, ": n_head is ", config.n_head, ", which does not divide n_embd ", config.n_embd,
                "; the nearest that do are ", below, " and ", above);
  }
  // In floating point, since an absurd product does not fit in 64 bits.
  const auto H = static_cast<double>(config.n_embd), I = static_cast<double>(config.n_inner);
  const double count = (2.0 * static_cast<double>(config.vocab_size) + static_cast<double>(config.n_positions)) * H +
                       static_cast<double>(config.n_layer) * (4 * H * H + 2 * H * I);
  check_usage(count < 1e14, where, ": n_embd ", config.n_embd, ", n_inner ", config.n_inner, ", n_layer ",
              config.n_layer, " and vocab_size ", config.vocab_size, " make about ", count,
              " parameters, more than any machine holds; lower them");

  for (const Number& number : numbers) {
    const float value = config.*number.member;
    check_usage(std::isfinite(value) && number.fits(value), where, ": ", number.name, " is ", value, ", it must be ",
                number.range);
  }
}

}  // namespace onescale

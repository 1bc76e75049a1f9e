#include "model/config.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <optional>

#include "kernels/error.h"
#include "kernels/philox.h"
#include "parallel/json.h"

namespace onescale {
namespace {

// The value of a setting that has two names; both may be there if they agree.
std::optional<Json> setting(const Json& json, const std::string& path, const std::string& name,
                            const std::string& alias) {
  if (!json.has(alias)) return json.has(name) ? std::optional(json.at(name)) : std::nullopt;
  check_usage(!json.has(name) || json.at(name).dump() == json.at(alias).dump(), path, ": ", name, " is ",
              json.has(name) ? json.at(name).dump() : "", " but ", alias, ", another name of it, is ",
              json.at(alias).dump(), "; remove one of them");
  return json.at(alias);
}

void read_integer(std::int64_t& out, const std::optional<Json>& value) {
  if (value) out = value->integer();
}

void read_number(float& out, const Json& json, const std::string& name) {
  if (json.has(name)) out = static_cast<float>(json.at(name).number());
}

void read_boolean(bool& out, const Json& json, const std::string& name) {
  if (json.has(name)) out = json.at(name).boolean();
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

// multi_query, and the two fields that say the same in other words.
void read_multi_query(ModelConfig& config, const Json& json, const std::string& path) {
  read_boolean(config.multi_query, json, "multi_query");
  if (json.has("attention_type") && !json.at("attention_type").is_null()) {
    const std::string type = json.at("attention_type").dump();
    check_usage(
        type == "1" || type == "2", path, ": attention_type is ", type,
        ", but only 1 (multi-head) and 2 (multi-query, fused c_attn) of the bigcode fork are known; convert the model");
    if (!json.has("multi_query")) config.multi_query = type == "2";
    check_usage(config.multi_query == (type == "2"), path, ": attention_type is ", type, " but multi_query is ",
                config.multi_query ? "true" : "false", "; remove one of them");
  }
  if (json.has("num_key_value_heads") && !json.at("num_key_value_heads").is_null()) {
    const std::int64_t heads = json.at("num_key_value_heads").integer();
    check_usage(heads == config.kv_heads(), path, ": num_key_value_heads is ", heads, ", but multi_query ",
                config.multi_query ? "true" : "false", " with n_head ", config.n_head, " means ", config.kv_heads(),
                "; the model has one K/V head or one per head, so remove the field or set it to that");
  }
}

// The double that a float's shortest decimal form names, so that 1e-5f is written as 1e-05.
double shortest(float value) {
  char text[32];
  *std::to_chars(text, text + sizeof text - 1, value).ptr = '\0';
  return std::strtod(text, nullptr);
}

}  // namespace

std::int64_t ModelConfig::parameters() const {
  const std::int64_t H = n_embd, I = n_inner, Q = qkv_size();
  const std::int64_t block = (H + 1) * Q + (H + 1) * H + (H + 1) * I + (I + 1) * H + 4 * H;
  return (vocab_size * (tie_word_embeddings ? 1 : 2) + n_positions) * H + n_layer * block + 2 * H;
}

ModelConfig read_config(const std::string& path_or_dir) {
  std::error_code ignored;
  const bool is_dir = std::filesystem::is_directory(path_or_dir, ignored);
  const std::string path = is_dir ? (std::filesystem::path(path_or_dir) / "config.json").string() : path_or_dir;
  const Json json = Json::read_file(path);
  check_usage(json.has("model_type"), path, ": has no model_type; this program trains \"gpt_bigcode\"");
  const std::string type = json.at("model_type").string();
  check_usage(type == "gpt_bigcode", path, ": model_type is \"", type, "\", but only \"gpt_bigcode\" can be trained");
  bool cross_attention = false;
  read_boolean(cross_attention, json, "add_cross_attention");
  check_usage(!cross_attention, path, ": add_cross_attention is true, but only decoders without it can be trained");
  check_usage(
      !json.has("quantization_config") || json.at("quantization_config").is_null(), path,
      ": quantization_config is set, but weights must be F32, BF16 or F16; save the model without quantization");

  ModelConfig config;
  read_integer(config.vocab_size, setting(json, path, "vocab_size", ""));
  read_integer(config.n_positions, setting(json, path, "n_positions", "max_position_embeddings"));
  read_integer(config.n_embd, setting(json, path, "n_embd", "hidden_size"));
  read_integer(config.n_layer, setting(json, path, "n_layer", "num_hidden_layers"));
  read_integer(config.n_head, setting(json, path, "n_head", "num_attention_heads"));
  std::optional<Json> n_inner = setting(json, path, "n_inner", "");
  if (n_inner && n_inner->is_null()) n_inner.reset();
  read_integer(config.n_inner, n_inner);
  check_usage(!n_inner || config.n_inner > 0, path, ": n_inner is ", config.n_inner,
              "; give a positive size, or null for 4 * n_embd");
  constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max() / 4;
  if (!n_inner && config.n_embd < largest) config.n_inner = 4 * config.n_embd;
  if (json.has("activation_function")) config.gelu = read_activation(path, json.at("activation_function").string());
  read_boolean(config.scale_attn_weights, json, "scale_attn_weights");
  read_boolean(config.tie_word_embeddings, json, "tie_word_embeddings");
  read_number(config.layer_norm_epsilon, json, "layer_norm_epsilon");
  read_number(config.initializer_range, json, "initializer_range");
  read_number(config.embd_pdrop, json, "embd_pdrop");
  read_number(config.resid_pdrop, json, "resid_pdrop");
  read_number(config.attn_pdrop, json, "attn_pdrop");
  read_token(config.bos_token_id, json, "bos_token_id", config.vocab_size);
  read_token(config.eos_token_id, json, "eos_token_id", config.vocab_size);
  read_multi_query(config, json, path);
  check_config(config, path);
  return config;
}

std::string config_json(const ModelConfig& config, const std::string& dtype) {
  Json json = Json::object(), architectures = Json::array();
  architectures.push(std::string("GPTBigCodeForCausalLM"));
  json.set("architectures", architectures);
  json.set("model_type", "gpt_bigcode");
  json.set("vocab_size", config.vocab_size);
  json.set("n_positions", config.n_positions);
  json.set("n_embd", config.n_embd);
  json.set("n_layer", config.n_layer);
  json.set("n_head", config.n_head);
  json.set("n_inner", config.n_inner);
  json.set("multi_query", config.multi_query);
  json.set("activation_function", config.gelu == Gelu::tanh ? "gelu_pytorch_tanh" : "gelu");
  json.set("scale_attn_weights", config.scale_attn_weights);
  json.set("layer_norm_epsilon", shortest(config.layer_norm_epsilon));
  json.set("initializer_range", shortest(config.initializer_range));
  json.set("embd_pdrop", shortest(config.embd_pdrop));
  json.set("resid_pdrop", shortest(config.resid_pdrop));
  json.set("attn_pdrop", shortest(config.attn_pdrop));
  json.set("tie_word_embeddings", config.tie_word_embeddings);
  for (const auto& [name, id] :
       {std::pair("bos_token_id", config.bos_token_id), {"eos_token_id", config.eos_token_id}}) {
    if (id < 0)
      json.set_null(name);
    else
      json.set(name, id);
  }
  json.set("dtype", dtype);
  return json.dump(2) + "\n";
}

void check_config(const ModelConfig& config, const std::string& where) {
  // Ids are int32; layers, heads and positions must fit in the key of a dropout draw.
  constexpr std::int64_t int32_max = std::numeric_limits<std::int32_t>::max();
  auto check_size = [&](const char* name, std::int64_t value, std::int64_t limit) {
    check_usage(value >= 1 && value <= limit, where, ": ", name, " is ", value, ", it must be from 1 to ", limit);
  };
  check_size("vocab_size", config.vocab_size, int32_max);
  check_size("n_positions", config.n_positions, DrawLimits::keys);
  check_size("n_embd", config.n_embd, int32_max);
  check_size("n_layer", config.n_layer, DrawLimits::layers);
  check_size("n_head", config.n_head, DrawLimits::heads);
  check_size("n_inner", config.n_inner, int32_max);
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

  auto check_range = [&](const char* name, float value, bool ok, const char* range) {
    check_usage(ok && std::isfinite(value), where, ": ", name, " is ", value, ", it must be ", range);
  };
  auto check_dropout = [&](const char* name, float p) { check_range(name, p, p >= 0 && p < 1, "from 0 to below 1"); };
  check_range("layer_norm_epsilon", config.layer_norm_epsilon, config.layer_norm_epsilon > 0, "above 0");
  check_range("initializer_range", config.initializer_range, config.initializer_range >= 0, "0 or above");
  check_dropout("embd_pdrop", config.embd_pdrop);
  check_dropout("resid_pdrop", config.resid_pdrop);
  check_dropout("attn_pdrop", config.attn_pdrop);
  for (const auto& [name, id] :
       {std::pair("bos_token_id", config.bos_token_id), {"eos_token_id", config.eos_token_id}}) {
    check_usage(id >= -1 && id < config.vocab_size, where, ": ", name, " is ", id, ", but vocab_size is ",
                config.vocab_size, "; ids are from 0 to below it, or -1 for none");
  }
}

}  // namespace onescale

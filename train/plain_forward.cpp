#include "train/plain_forward.h"

#include <cmath>
#include <numbers>

namespace onescale {

namespace {

using Row = std::vector<double>;

double dot(const double* a, const double* b, std::size_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

struct Plain {
  const ModelConfig& config;
  const PlainWeights& weights;
  const PlainDropout& dropout;
  std::int64_t row = 0;
  std::size_t C = static_cast<std::size_t>(config.n_embd);

  const Row& at(const std::string& name) const { return weights.at(name); }

  // W x, W [rows, x.size()]
  static Row product(const Row& W, const Row& x) {
    Row y(W.size() / x.size());
    for (std::size_t o = 0; o < y.size(); ++o) y[o] = dot(&W[o * x.size()], x.data(), x.size());
    return y;
  }
  Row linear(const std::string& name, const Row& x) const {
    Row y = product(at(name + ".weight"), x);
    add(y, at(name + ".bias"));
    return y;
  }
  Row normed(const std::string& name, const Row& x) const {
    const Row &w = at(name + ".weight"), &b = at(name + ".bias");
    double mean = 0, variance = 0;
    for (const double v : x) mean += v / static_cast<double>(C);
    for (const double v : x) variance += (v - mean) * (v - mean) / static_cast<double>(C);
    Row y(C);
    for (std::size_t i = 0; i < C; ++i)
      y[i] = (x[i] - mean) / std::sqrt(variance + static_cast<double>(config.layer_norm_epsilon)) * w[i] + b[i];
    return y;
  }
  double gelu(double x) const {
    if (config.gelu == Gelu::erf) return x / 2 * (1 + std::erf(x / std::numbers::sqrt2));
    return x / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
  }

  Row dropped(Row x, Site site, std::int64_t layer, std::size_t position) const {
    for (std::size_t i = 0; dropout && i < x.size(); ++i)
      x[i] *= dropout(site, layer, row, static_cast<std::int64_t>(position), 0, static_cast<std::int64_t>(i));
    return x;
  }

  // Of the last of the tokens whose projections are given. Multi-query: [Q of all heads | K | V]; otherwise [q k v] of
  // each head.
  Row attention(const std::vector<Row>& qkv, std::int64_t layer) const {
    const auto heads = static_cast<std::size_t>(config.n_head), d = C / heads;
    const double scale = config.scale_attn_weights ? 1 / std::sqrt(static_cast<double>(d)) : 1;
    Row out(C, 0.0);
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t q = config.multi_query ? h * d : h * 3 * d, k = config.multi_query ? C : q + d, v = k + d;
      Row p;
      double sum = 0;
      for (const Row& token : qkv) sum += p.emplace_back(std::exp(scale * dot(&qkv.back()[q], &token[k], d)));
      for (std::size_t t = 0; t < p.size(); ++t) {
        const double kept = dropout ? dropout(Site::attention, layer, row, std::ssize(p) - 1,
                                              static_cast<std::int64_t>(h), static_cast<std::int64_t>(t))
                                    : 1;
        for (std::size_t i = 0; i < d; ++i) out[h * d + i] += p[t] / sum * kept * qkv[t][v + i];
      }
    }
    return out;
  }

  // The hidden states of one row's tokens after block `layer`.
  void block(std::vector<Row>& x, std::int64_t layer) const {
    const std::string name = "transformer.h." + std::to_string(layer) + ".";
    std::vector<Row> qkv;
    for (std::size_t t = 0; t < x.size(); ++t) {
      qkv.push_back(linear(name + "attn.c_attn", normed(name + "ln_1", x[t])));
      add(x[t], dropped(linear(name + "attn.c_proj", attention(qkv, layer)), Site::attention_output, layer, t));
      Row inner = linear(name + "mlp.c_fc", normed(name + "ln_2", x[t]));
      for (double& v : inner) v = gelu(v);
      add(x[t], dropped(linear(name + "mlp.c_proj", inner), Site::mlp_output, layer, t));
    }
  }
  static void add(Row& x, const Row& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  double token_loss(const Row& x, std::size_t label) const {
    const Row logits = product(at(config.tie_word_embeddings ? "transformer.wte.weight" : "lm_head.weight"),
                               normed("transformer.ln_f", x));
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - logits[label]);
    return std::log(sum);
  }
};

}  // namespace

double plain_loss(const ModelConfig& config, const PlainWeights& weights, std::int64_t T,
                  const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& labels,
                  const PlainDropout& dropout) {
  Plain plain{config, weights, dropout};
  const auto length = static_cast<std::size_t>(T);
  const Row &wte = weights.at("transformer.wte.weight"), &wpe = weights.at("transformer.wpe.weight");
  double sum = 0, good = 0;
  for (std::size_t first = 0; first < ids.size(); first += length, ++plain.row) {
    std::vector<Row> x(length, Row(plain.C));
    for (std::size_t t = 0; t < length; ++t) {
      for (std::size_t i = 0; i < plain.C; ++i)
        x[t][i] = wte[static_cast<std::size_t>(ids[first + t]) * plain.C + i] + wpe[t * plain.C + i];
      x[t] = plain.dropped(x[t], Site::embedding, 0, t);
    }
    for (std::int64_t layer = 0; layer < config.n_layer; ++layer) plain.block(x, layer);
    for (std::size_t t = 0; t < length; ++t) {
      if (labels[first + t] == -100) continue;
      sum += plain.token_loss(x[t], static_cast<std::size_t>(labels[first + t]));
      ++good;
    }
  }
  return sum / good;
}

void PlainOptimizer::update(PlainWeights& weights, const PlainWeights& gradient) {
  ++count;
  for (auto& [name, w] : weights) {
    const bool decays = name.ends_with(".weight") && name.find(".ln_") == std::string::npos;
    Row &m = first[name], &v = second[name];
    m.resize(w.size()), v.resize(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = gradient.at(name)[i];
      m[i] = beta1 * m[i] + (1 - beta1) * g;
      v[i] = beta2 * v[i] + (1 - beta2) * g * g;
      const double mean = m[i] / (1 - std::pow(beta1, count)), square = v[i] / (1 - std::pow(beta2, count));
      w[i] -= lr * ((adamw ? mean / (std::sqrt(square) + eps) : g) + (decays ? weight_decay * w[i] : 0));
    }
  }
}

}  // namespace onescale

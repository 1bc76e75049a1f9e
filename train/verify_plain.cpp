// What `onescale verify` holds the one process to that everything else is compared with: the slopes of a plain float64
// forward, and a plain optimizer.
#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/error.h"
#include "model/parameters.h"
#include "train/verify.h"

namespace onescale {

PlainWeights plain_weights(const VerifyCase& c) {
  PlainWeights weights;
  const ParameterTable table = gpt_bigcode_table(c.config);
  for (std::size_t i = 0; i < table.parameters.size(); ++i) {
    std::vector<float> values(static_cast<std::size_t>(table.parameters[i].numel()));
    c.weights(i, 0, table.parameters[i].numel(), values.data());
    weights[table.parameters[i].name].assign(values.begin(), values.end());
  }
  return weights;
}

double plain_loss(const VerifyCase& c, const PlainWeights& weights) {
  const ModelConfig& m = c.config;
  const PlainDropout dropout = [&](Site site, std::int64_t layer, std::int64_t row, std::int64_t position,
                                   std::int64_t head, std::int64_t element) {
    const float p = site == Site::embedding ? m.embd_pdrop : site == Site::attention ? m.attn_pdrop : m.resid_pdrop;
    const std::uint32_t group =
        site == Site::attention ? attention_group(head, element) : static_cast<std::uint32_t>(element / 4);
    const Philox words = philox(dropout_counter(site, layer, 0, row, position, group), verify_seed);
    return words[static_cast<std::size_t>(element % 4)] < drop_threshold(p) ? 0 : 1 / (1 - static_cast<double>(p));
  };
  const bool drops = m.embd_pdrop > 0 || m.resid_pdrop > 0 || m.attn_pdrop > 0;
  return plain_loss(m, weights, c.batch.seq_len, c.batch.ids, c.batch.labels, drops ? dropout : PlainDropout());
}

std::vector<Part> tensor_parts(const ModelConfig& config, std::int64_t seq_len) {
  std::vector<Part> parts;
  const ParameterTable table = gpt_bigcode_table(config);
  for (std::size_t i = 0; i < table.parameters.size(); ++i) {
    const Parameter& p = table.parameters[i];
    const std::int64_t rows = p.shape[0], columns = p.numel() / rows;
    const auto add = [&](const std::string& name, std::int64_t begin, std::int64_t end) {
      if (parts.empty() || parts.back().name != p.name + name) parts.push_back({p.name + name, {}});
      parts.back().ranges.push_back({i, begin * columns, end * columns});
    };
    if (p.tp_rule == TpRule::fused_qkv) {
      const std::int64_t d = config.head_size(), q = config.n_embd / config.kv_heads();
      for (const char which : {'Q', 'K', 'V'}) {
        const std::int64_t begin = which == 'Q' ? 0 : which == 'K' ? q : q + d, end = which == 'Q' ? q : begin + d;
        for (std::int64_t first = 0; first < rows; first += q + 2 * d) add(str(" ", which), first + begin, first + end);
      }
    } else if (p.name == "transformer.wpe.weight") {
      for (std::int64_t row = 0; row < seq_len; ++row) add(str(" row ", row), row, row + 1);
      if (seq_len < rows) add(" rows that are not read", seq_len, rows);
    } else if (columns == 1) {
      add("", 0, rows);
    } else {
      for (const std::int64_t k : {0, 1, 2, 3}) add(str(" quarter ", k), rows * k / 4, rows * (k + 1) / 4);
    }
  }
  return parts;
}

std::vector<Slopes> plain_slopes(const VerifyCase& c, const std::vector<Part>& parts) {
  PlainWeights weights = plain_weights(c);
  const ParameterTable table = gpt_bigcode_table(c.config);
  std::vector<Slopes> all;
  std::mt19937_64 random;
  for (const Part& part : parts) {
    all.push_back({part, {}, {}});
    std::vector<double*> elements;
    for (const Part::Range& range : part.ranges)
      for (std::int64_t e = range.begin; e < range.end; ++e)
        elements.push_back(&weights.at(table.parameters[range.parameter].name)[static_cast<std::size_t>(e)]);
    std::vector<double> here;
    for (const double* w : elements) here.push_back(*w);
    for (int k = 0; k < 3; ++k) {
      std::vector<double> u;
      double square = 0;
      for (std::size_t e = 0; e < here.size(); ++e) {
        const double x = std::ldexp(static_cast<double>(random() >> 11), -53) - 0.5;
        u.push_back(x + std::copysign(0.5, x));
        square += u[e] * u[e];
      }
      for (double& x : u) x /= std::sqrt(square);
      const auto loss_at = [&](double distance) {
        for (std::size_t e = 0; e < u.size(); ++e) *elements[e] = here[e] + distance * u[e];
        return plain_loss(c, weights);
      };
      // 1e-5: its square times a sixth of the third derivative, and the rounding of two losses over it, are some 1e-10.
      all.back().values.push_back((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5);
      all.back().directions.push_back(std::move(u));
    }
    for (std::size_t e = 0; e < here.size(); ++e) *elements[e] = here[e];
  }
  return all;
}

bool plain_is_flat(const VerifyCase& c, const Part& part) {
  return std::ranges::all_of(plain_slopes(c, {part})[0].values, [](double slope) { return slope == 0; });
}

std::pair<double, std::string> worst_slope(const std::vector<Slopes>& plain, const WholeTensors& gradient) {
  std::pair<double, std::string> worst;
  for (const auto& [part, directions, values] : plain) {
    double square = squares(gradient[part.ranges[0].parameter]) / 100;
    square = std::max(square, std::pow(likeness(part, gradient, gradient).norm, 2));
    for (std::size_t k = 0; k < values.size(); ++k) {
      const double* u = directions[k].data();
      double along = 0;
      for (const Part::Range& range : part.ranges)
        for (std::int64_t e = range.begin; e < range.end; ++e)
          along += *u++ * static_cast<double>(gradient[range.parameter][static_cast<std::size_t>(e)]);
      // A slope is some 1 / sqrt(n) of the norm.
      const double error = std::abs(along - values[k]) * std::sqrt(static_cast<double>(directions[k].size()) / square);
      if (worse(error, worst.first)) worst = {error, part.name};
    }
  }
  return worst;
}

WholeTensors plain_updates(Communicator& world, const VerifyCase& c) {
  const Options& o = c.options;
  const ParameterTable table = gpt_bigcode_table(c.config);
  const PlainWeights before = plain_weights(c);
  PlainWeights weights = before;
  PlainOptimizer plain{o.optimizer == "adamw", o.lr, o.beta1, o.beta2, o.eps, o.weight_decay};
  for (std::int64_t i = 0; i < o.steps; ++i) {
    const auto now = [&](std::size_t p, std::int64_t first, std::int64_t count, float* out) {
      const double* w = weights.at(table.parameters[p].name).data() + first;
      std::transform(w, w + count, out, [](double x) { return static_cast<float>(x); });
    };
    const WholeTensors gradient = measure_alone(world, gradient_of({c.config, now, c.batch, c.options})).gradient;
    double square = 0;
    for (const std::vector<float>& g : gradient) square += squares(g);
    PlainWeights clipped;
    for (std::size_t p = 0; p < gradient.size(); ++p)
      for (const float g : gradient[p])
        clipped[table.parameters[p].name].push_back(g * std::min(1.0, o.clip_norm / std::sqrt(square)));
    if (!gradient.empty()) plain.update(weights, clipped);
  }
  WholeTensors change;
  for (const Parameter& p : table.parameters)
    for (std::vector<float>& x = change.emplace_back(); std::ssize(x) < p.numel();)
      x.push_back(static_cast<float>((before.at(p.name)[x.size()] - weights.at(p.name)[x.size()]) / o.lr));
  return change;
}

}  // namespace onescale

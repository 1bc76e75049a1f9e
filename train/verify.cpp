#include "train/verify.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/error.h"
#include "model/parameters.h"
#include "parallel/replicas.h"

namespace onescale {

namespace {

std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x = (x + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::size_t position(const ParameterTable& table, const std::string& name) {
  const auto at = std::find_if(table.parameters.begin(), table.parameters.end(),
                               [&](const Parameter& p) { return p.name == name; });
  return static_cast<std::size_t>(at - table.parameters.begin());
}

}  // namespace

std::int64_t small_heads(int world) {
  return std::lcm(4, world);
}

VerifyCase small_case(int world, bool multi_query, bool tied) {
  const std::int64_t heads = small_heads(world);
  VerifyCase c;
  c.config.n_head = heads;
  c.config.n_embd = 5 * heads;
  c.config.n_inner = 9 * heads;
  c.config.n_layer = 3;
  c.config.vocab_size = 97;
  c.config.n_positions = 2 * heads + 3;
  c.config.multi_query = multi_query;
  c.config.tie_word_embeddings = tied;
  c.config.embd_pdrop = c.config.resid_pdrop = c.config.attn_pdrop = 0;
  c.config.bos_token_id = c.config.eos_token_id = -1;
  const ParameterTable table = gpt_bigcode_table(c.config);
  c.weights = [table](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    for (std::int64_t e = 0; e < count; ++e) {
      const std::uint64_t bits = mixed(mixed(i) + static_cast<std::uint64_t>(first + e));
      out[e] = table.parameters[i].init_mean + static_cast<float>(bits >> 40) * 0x1p-24f * 0.6f - 0.3f;
    }
  };
  c.batch.rows = 2 * heads;
  c.batch.seq_len = 2 * heads;
  const std::int64_t T = c.batch.seq_len, n = c.batch.rows * (T + 1);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t row = i / (T + 1), t = i % (T + 1);
    const auto id = static_cast<std::int32_t>(mixed(static_cast<std::uint64_t>(i)) % 97);
    if (t < T) c.batch.ids.push_back(id);
    if (t > 0) c.batch.labels.push_back(t <= 3 * row % T ? -100 : id);
  }
  return c;
}

VerifyCase known_losses(const VerifyCase& small) {
  VerifyCase c = small;
  const ParameterTable table = gpt_bigcode_table(c.config);
  const std::size_t wte = position(table, "transformer.wte.weight"), scale = position(table, "transformer.ln_f.weight"),
                    shift = position(table, "transformer.ln_f.bias");
  const std::int64_t V = c.config.vocab_size, C = c.config.n_embd;
  c.weights = [=, inner = small.weights](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    inner(i, first, count, out);
    // Whatever the blocks do, the head sees the first unit vector, and the logits are the table's first column.
    constexpr double loss[4] = {4, 1, 2, 6};
    double rest = 1;
    for (const double l : loss) rest -= std::exp(-l);
    for (std::int64_t e = 0; e < count; ++e) {
      const std::int64_t row = (first + e) / C;
      if (i == scale) out[e] = 0;
      if (i == shift) out[e] = first + e == 0 ? 1.0f : 0.0f;
      if (i == wte && (first + e) % C == 0)
        out[e] = static_cast<float>(row < 4 ? -loss[row] : std::log(rest / static_cast<double>(V - 4)));
    }
  };
  return c;
}

VerifyCase model_case(const Options& options, const ModelSource& source, int ranks, std::int64_t memory) {
  VerifyCase c{source.config(), nullptr,
               options.batch.empty() ? small_case(ranks).batch : read_batch(options.batch, source.config())};
  c.config.embd_pdrop = c.config.resid_pdrop = c.config.attn_pdrop = 0;
  check_usage(c.batch.seq_len <= c.config.n_positions, "the model's n_positions ", c.config.n_positions,
              " is below the ", c.batch.seq_len, " tokens of a row; give a shorter batch or fewer ranks");
  const auto too_large = [&] {
    const std::unique_ptr<Device> dry = make_device(options, true);
    const std::unique_ptr<Mesh> mesh = Mesh::single();
    StepSettings settings = verify_settings(options, c);
    settings.micro_batch = c.batch.rows;
    ModelWeights weights(*dry, *mesh, c.config, settings.zero);
    Step(weights, settings).run_empty();
    const auto kinds = dry->memory();
    // On the host there are the gradient, the exact one and a copy on its way.
    return std::accumulate(kinds.begin(), kinds.end(), 12 * c.config.parameters()) > memory;
  };
  while (c.config.n_layer > 1 && too_large()) c.config.n_layer /= 2;
  while (c.config.vocab_size > 64 && too_large()) c.config.vocab_size /= 2;
  for (auto* ids : {&c.batch.ids, &c.batch.labels})
    for (std::int32_t& id : *ids)
      if (id >= 0) id = static_cast<std::int32_t>(id % c.config.vocab_size);
  // By name, for positions change with the number of blocks; a smaller table is the beginning of the whole one.
  std::vector<std::size_t> from;
  for (const Parameter& p : gpt_bigcode_table(c.config).parameters) from.push_back(position(source.table(), p.name));
  c.weights = [from, &source](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    source.read(from[i], first, count, out);
  };
  return c;
}

WholeTensors read_whole(const VerifyCase& c) {
  WholeTensors all;
  for (const Parameter& p : gpt_bigcode_table(c.config).parameters) {
    all.emplace_back(static_cast<std::size_t>(p.numel()));
    c.weights(all.size() - 1, 0, p.numel(), all.back().data());
  }
  return all;
}

StepSettings verify_settings(const Options& options, const VerifyCase& c) {
  StepSettings settings = step_settings(options, c.batch.seq_len);
  settings.micro_batch = 0;
  settings.optimizer = {false, 0, 0, 0, 0};
  settings.clip_norm = 0;
  return settings;
}

Measured measure(const Options& options, Communicator& group, const Layout& layout, const VerifyCase& c,
                 StepSettings settings, int steps, double lr) {
  const std::int64_t rows = c.batch.rows / layout.dp;
  if (settings.micro_batch == 0) settings.micro_batch = rows % 2 == 0 ? rows / 2 : 1;
  const std::unique_ptr<Device> device = make_device(options, false);
  Mesh mesh(group, layout);
  ModelWeights weights(*device, mesh, c.config, settings.zero);
  weights.load(c.weights);
  Step step(weights, settings);
  Measured m;
  for (int i = 0; i < steps; ++i) {
    m.result = step.run(c.batch.of_rank(layout), 7, i, lr);
    m.losses.push_back(m.result.loss);
  }
  try {
    check_replicas(*device, mesh, weights.place(), weights.units(), settings.zero.stage);
  } catch (const Error& e) {  // which every rank throws alike
    m.replicas = e.what();
  }
  for (int unit = 0; unit < weights.place().units(); ++unit) {  // nothing stays under way
    weights.units().gather(unit);
    weights.units().release(unit);
  }
  for (std::size_t i = 0; steps == 1 && i < weights.table().parameters.size(); ++i) {
    const std::int64_t n = layout.rank == 0 ? weights.table().parameters[i].numel() : 0;
    std::vector<std::int64_t> wanted(static_cast<std::size_t>(layout.world()), -1);
    wanted[0] = static_cast<std::int64_t>(i);
    std::vector<float> after(static_cast<std::size_t>(n));
    weights.assembly().gather(wanted, weights.source(), after.data());
    if (layout.rank != 0) continue;
    std::vector<float>& change = m.gradient.emplace_back(after.size());
    c.weights(i, 0, n, change.data());
    for (std::size_t e = 0; e < after.size(); ++e)
      change[e] = static_cast<float>((static_cast<double>(change[e]) - after[e]) / lr);
  }
  return m;
}

Measured measure_alone(const Options& options, const VerifyCase& c, StepSettings settings, int steps, double lr) {
  settings.micro_batch = c.batch.rows;
  const auto alone = make_single_communicator("world");
  return measure(options, *alone, Layout{}, c, settings, steps, lr);
}

std::vector<Part> each_parameter(const ParameterTable& table) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < table.parameters.size(); ++i)
    parts.push_back({table.parameters[i].name, {{i, 0, table.parameters[i].numel()}}});
  return parts;
}

std::vector<Part> parameter_groups(const ModelConfig& config) {
  const ParameterTable table = gpt_bigcode_table(config);
  std::vector<Part> groups = {
      {"embeddings", {}},  {"c_attn Q rows", {}}, {"c_attn K/V rows", {}}, {"attention c_proj", {}}, {"mlp", {}},
      {"layer norms", {}}, {"head", {}}};
  for (std::size_t i = 0; i < table.parameters.size(); ++i) {
    const Parameter& p = table.parameters[i];
    const auto has = [&](const char* text) { return p.name.find(text) != std::string::npos; };
    if (p.tp_rule == TpRule::fused_qkv) {
      const std::int64_t columns = p.numel() / p.shape[0], d = config.head_size();
      // Multi-query: all Q rows, then K and V. Otherwise [head, (q, k, v), d].
      const std::int64_t cut = config.multi_query ? config.n_embd * columns : d * columns;
      const std::int64_t period = config.multi_query ? p.numel() : 3 * d * columns;
      for (std::int64_t first = 0; first < p.numel(); first += period) {
        groups[1].ranges.push_back({i, first, first + cut});
        groups[2].ranges.push_back({i, first + cut, first + period});
      }
      continue;
    }
    const std::size_t group = has("lm_head") ? 6 : has(".ln_") ? 5 : has(".mlp.") ? 4 : has("attn.c_proj") ? 3 : 0;
    groups[group].ranges.push_back({i, 0, p.numel()});
  }
  if (groups.back().ranges.empty()) groups.pop_back();
  return groups;
}

Likeness likeness(const Part& part, const WholeTensors& g, const WholeTensors& ref, double right) {
  double dot = 0, square = 0, own = 0, error = 0;
  for (const Part::Range& range : part.ranges) {
    for (auto e = static_cast<std::size_t>(range.begin); e < static_cast<std::size_t>(range.end); ++e) {
      const double a = g[range.parameter][e], b = ref[range.parameter][e];
      dot += a * b;
      square += b * b;
      own += a * a;
      error += (a - right * b) * (a - right * b);
    }
  }
  constexpr double infinite = std::numeric_limits<double>::infinity();
  if (square == 0) return own == 0 ? Likeness{1, 0, 0, 0} : Likeness{infinite, infinite, infinite, 0};
  const double ratio = dot / square;
  return {ratio, std::sqrt(error / square) / right, std::sqrt(std::abs(own - ratio * dot) / square), std::sqrt(square)};
}

}  // namespace onescale

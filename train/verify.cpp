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

VerifyCase make_case(Options options, ModelConfig config, FetchRange weights, HostBatch batch) {
  config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0;
  options.micro_batch = 0;
  return gradient_of({config, std::move(weights), std::move(batch), std::move(options)});
}

}  // namespace

VerifyCase gradient_of(VerifyCase c) {
  c.options.optimizer = "sgd";
  c.options.steps = 1;
  c.options.lr = 1 << 20;
  c.options.weight_decay = c.options.clip_norm = 0;
  return c;
}

VerifyCase small_case(const Options& options, int world, bool multi_query, bool tied) {
  const std::int64_t heads = std::lcm(4, world), T = 2 * heads;
  const ModelConfig config{.vocab_size = 97,
                           .n_positions = T + 3,
                           .n_embd = 5 * heads,
                           .n_layer = 3,
                           .n_head = heads,
                           .n_inner = 9 * heads,
                           .multi_query = multi_query,
                           .tie_word_embeddings = tied};
  HostBatch batch{2 * heads, T, {}, {}};
  for (std::int64_t i = 0; i < batch.rows * (T + 1); ++i) {
    const auto id = static_cast<std::int32_t>(mixed(static_cast<std::uint64_t>(i)) % 97);
    if (i % (T + 1) < T) batch.ids.push_back(id);
    if (i % (T + 1) > 0) batch.labels.push_back(id);
  }
  const auto weights = [table = gpt_bigcode_table(config)](std::size_t i, std::int64_t first, std::int64_t count,
                                                           float* out) {
    for (std::int64_t e = 0; e < count; ++e) {
      const std::uint64_t bits = mixed(mixed(i) + static_cast<std::uint64_t>(first + e));
      out[e] = table.parameters[i].init_mean + static_cast<float>(bits >> 40) * 0x1p-24f * 0.6f - 0.3f;
    }
  };
  return make_case(options, config, weights, batch);
}

VerifyCase model_case(const Options& options, const ModelSource& source, HostBatch batch) {
  check_usage(count_good_tokens(batch.labels.data(), std::ssize(batch.labels)) > 0, "every label of ", options.batch,
              " is ignored, so that there is no gradient; give another batch");
  return make_case(options, source.config(), source.fetch(), std::move(batch));
}

void cut_to_memory(VerifyCase& c, const ModelSource& source, std::int64_t memory) {
  const auto too_large = [&] {
    const std::unique_ptr<Device> dry = make_device(c.options, true);
    const std::unique_ptr<Mesh> mesh = Mesh::single();
    StepSettings settings = step_settings(c.options, c.batch.seq_len);
    settings.micro_batch = c.batch.rows;
    settings.recompute = Recompute::none;  // as in what is compared with
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
  c.weights = [table = gpt_bigcode_table(c.config), &source](std::size_t i, std::int64_t first, std::int64_t count,
                                                             float* out) {
    std::size_t at = 0;
    while (source.table().parameters[at].name != table.parameters[i].name) ++at;
    source.read(at, first, count, out);
  };
}

VerifyCase masked(VerifyCase c, std::int64_t rows, const std::function<bool(std::int64_t row, std::int64_t t)>& good) {
  c.batch.rows = rows;
  for (std::int64_t i = 0; i < rows * c.batch.seq_len; ++i)
    if (!good(i / c.batch.seq_len, i % c.batch.seq_len)) c.batch.labels[static_cast<std::size_t>(i)] = -100;
  return c;
}

VerifyCase repeated(VerifyCase c, int times) {
  const HostBatch once = c.batch;
  for (int i = 1; i < times; ++i) {
    c.batch.rows += once.rows;
    c.batch.ids.insert(c.batch.ids.end(), once.ids.begin(), once.ids.end());
    c.batch.labels.insert(c.batch.labels.end(), once.labels.begin(), once.labels.end());
  }
  return c;
}

VerifyCase uneven(const VerifyCase& c) {
  return masked(c, c.batch.rows, [T = c.batch.seq_len](auto row, auto t) { return t >= 3 * row % T; });
}

VerifyCase known_losses(const VerifyCase& small, std::int64_t rows) {
  VerifyCase c = masked(small, rows, [](auto, auto) { return false; });
  // The head sees the first unit vector, so that the logits are the table's first column.
  c.weights = [config = c.config](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    const std::string name = gpt_bigcode_table(config).parameters[i].name;
    constexpr double loss[4] = {4, 1, 2, 6};
    double rest = 1;
    for (const double l : loss) rest -= std::exp(-l);
    const double other = std::log(rest / static_cast<double>(config.vocab_size - 4));
    for (std::int64_t e = first, row = 0; e < first + count; ++e) {
      const bool logit = name == "transformer.wte.weight" && e % config.n_embd == 0;
      row = e / config.n_embd;
      *out++ = static_cast<float>(logit ? (row < 4 ? -loss[row] : other) : name == "transformer.ln_f.bias" && e == 0);
    }
  };
  return c;
}

std::unique_ptr<Mesh> first_ranks(Communicator& world, Layout layout) {
  if (world.rank() >= layout.world()) return nullptr;
  layout.rank = world.rank();
  std::vector<int> members(static_cast<std::size_t>(layout.world()));
  std::iota(members.begin(), members.end(), 0);
  return std::make_unique<Mesh>(world.split(members, "world"), layout);
}

Measured measure(Communicator& world, const Layout& layout, const VerifyCase& c) {
  const std::unique_ptr<Mesh> mesh = first_ranks(world, layout);
  if (!mesh) return {};
  StepSettings settings = step_settings(c.options, c.batch.seq_len);
  const std::int64_t rows = c.batch.rows / layout.dp;
  if (settings.micro_batch == 0) settings.micro_batch = rows % 2 == 0 ? rows / 2 : 1;
  const std::unique_ptr<Device> device = make_device(c.options, false);
  ModelWeights weights(*device, *mesh, c.config, settings.zero);
  weights.load(c.weights);
  Step step(weights, settings);
  Measured m;
  for (std::int64_t i = 0; i < c.options.steps; ++i) {
    m.result = step.run(c.batch.of_rank(mesh->layout), verify_seed, i, c.options.lr);
    m.losses.push_back(m.result.loss);
  }
  try {
    check_replicas(*device, *mesh, weights.place(), weights.units(), settings.zero.stage);
  } catch (const Error& e) {  // which every rank throws alike
    m.replicas = e.what();
  }
  for (int unit = 0; unit < weights.place().units(); ++unit) {  // nothing stays under way
    weights.units().gather(unit);
    weights.units().release(unit);
  }
  for (std::size_t i = 0; i < weights.table().parameters.size(); ++i) {
    const std::int64_t n = world.rank() == 0 ? weights.table().parameters[i].numel() : 0;
    std::vector<std::int64_t> wanted(static_cast<std::size_t>(layout.world()), -1);
    wanted[0] = static_cast<std::int64_t>(i);
    std::vector<float> after(static_cast<std::size_t>(n));
    weights.assembly().gather(wanted, weights.source(), after.data());
    if (world.rank() != 0) continue;
    std::vector<float>& change = m.gradient.emplace_back(after.size());
    c.weights(i, 0, n, change.data());
    for (std::size_t e = 0; e < after.size(); ++e)
      change[e] = static_cast<float>((static_cast<double>(change[e]) - after[e]) / c.options.lr);
  }
  return m;
}

Measured measure_alone(Communicator& world, VerifyCase c) {
  c.options.micro_batch = c.batch.rows;
  return measure(world, Layout{}, c);
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

Likeness likeness(const Part& part, const WholeTensors& g, const WholeTensors& ref) {
  double dot = 0, square = 0, own = 0;
  for (const Part::Range& range : part.ranges) {
    for (auto e = static_cast<std::size_t>(range.begin); e < static_cast<std::size_t>(range.end); ++e) {
      const double a = g[range.parameter][e], b = ref[range.parameter][e];
      dot += a * b;
      square += b * b;
      own += a * a;
    }
  }
  constexpr double infinite = std::numeric_limits<double>::infinity();
  if (square == 0)
    return own == 0 ? Likeness{std::numeric_limits<double>::quiet_NaN(), 0, 0} : Likeness{infinite, infinite, 0};
  const double ratio = dot / square;
  return {ratio, std::sqrt(std::abs(own - ratio * dot) / square), std::sqrt(square)};
}

double squares(const std::vector<float>& x) {
  return std::accumulate(x.begin(), x.end(), 0.0, [](double sum, double e) { return sum + e * e; });
}

}  // namespace onescale

#include "tests/parity/trial.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "model/parameters.h"
#include "parallel/replicas.h"
#include "tests/train/golden.h"

namespace onescale::parity {

namespace {

// Normal values by tensor and element, LayerNorm's weights around 1.
FetchRange random_weights(const ModelConfig& config, float scale) {
  const ParameterTable table = gpt_bigcode_table(config);
  return [table, scale](std::size_t parameter, std::int64_t first, std::int64_t count, float* out) {
    const std::unique_ptr<Device> device = make_cpu_device(1, false);
    device->random_normal(Tensor(out, DType::float32, {count}), 3, static_cast<std::int64_t>(parameter), first, scale);
    const float mean = table.parameters[parameter].init_mean;
    for (std::int64_t i = 0; i < count; ++i) out[i] += mean;
  };
}

// The elements [begin, end) of K in each head's part of c_attn.bias, and how far it is to the next head's.
struct KeyBias {
  std::int64_t begin, end, stride;
};
KeyBias key_bias(const ModelConfig& c) {
  const std::int64_t d = c.head_size();
  return c.multi_query ? KeyBias{c.n_embd, c.n_embd + d, c.qkv_size()} : KeyBias{d, 2 * d, 3 * d};
}

double norm(const std::vector<double>& x) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  return std::sqrt(squares);
}

}  // namespace

Model small_model(bool multi_query, bool tied, bool dropout) {
  ModelConfig c;
  c.vocab_size = 27, c.n_positions = 20, c.n_embd = 32, c.n_layer = 2, c.n_head = 8, c.n_inner = 24;
  c.multi_query = multi_query;
  c.tie_word_embeddings = tied;
  c.embd_pdrop = dropout ? 0.1f : 0, c.resid_pdrop = dropout ? 0.2f : 0, c.attn_pdrop = dropout ? 0.3f : 0;
  return {c, random_weights(c, 0.2f)};
}

Model other_model(std::int64_t heads, std::int64_t vocab, float scale) {
  Model m = small_model(true, true, false);
  m.config.n_head = heads, m.config.n_embd = 2 * heads, m.config.vocab_size = vocab;
  m.fetch = random_weights(m.config, scale);
  return m;
}

std::string Path::text() const {
  const char* reductions[] = {"ordered", "reduce_scatter", "all_reduce"};
  const char* recomputes[] = {"none", "light", "block"};
  return str("dp=", dp, " sp=", sp, " tp=", tp, " zero=", stage, " ", reductions[static_cast<int>(reduction)],
             " bucket=", bucket, sp_mode == SpMode::ulysses ? " ulysses" : " gather_kv",
             " micro_batches=", micro_batches, " ", name_of(dtype),
             " recompute=", recomputes[static_cast<int>(recompute)],
             wire == DType::float32 ? "" : " bfloat16 on the wire");
}

StepSettings Path::settings(std::int64_t rows, std::int64_t seq_len) const {
  StepSettings s;
  s.micro_batch = rows / dp / micro_batches;
  s.seq_len = seq_len;
  s.zero = {stage, {reduction, bucket > 0 ? bucket * 4 / 1048576 : 1024, wire}, dtype};
  s.sp_mode = sp_mode;
  s.recompute = recompute;
  s.optimizer.adamw = false;
  return s;
}

Trial::Trial(Mesh& mesh, const Model& model, const StepSettings& settings)
    : device(make_cpu_device(1, false)), weights(*device, mesh, model.config, settings.zero), step(weights, settings) {
  weights.load(model.fetch);
}

Whole Trial::gather(const Assembly::Source& source) {
  const int ranks = weights.mesh().world.size();
  const bool root = weights.mesh().world.rank() == 0;
  Whole all;
  for (std::size_t i = 0; i < weights.table().parameters.size(); ++i) {
    std::vector<std::int64_t> wanted(static_cast<std::size_t>(ranks), -1);
    wanted[0] = static_cast<std::int64_t>(i);
    std::vector<float> tensor(root ? static_cast<std::size_t>(weights.table().parameters[i].numel()) : 0, NAN);
    weights.assembly().gather(wanted, source, tensor.data());
    if (root) all.push_back(tensor);
  }
  return all;
}

// float32: what the convention promises. bfloat16 keeps 8 bits; two layouts round other partial sums, some ten times on
// the way: a few percent, which averages out in the ratio of a matrix, less so in that of 32 biases. On the wire, each
// rank's addend or sum is rounded once or a few times.
Tolerance tolerance(const Path& path) {
  if (path.dtype == DType::bfloat16) return {6e-2, 3e-2};
  return path.wire == DType::bfloat16 ? Tolerance{2e-2, 1e-2} : Tolerance{1e-5, 1e-5};
}

bool near(double x, double want, double relative) {
  return std::abs(x - want) <= relative * std::abs(want);  // false where one is NaN
}

std::vector<double> widened(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}

void clear_key_bias(const ModelConfig& config, const std::string& name, std::vector<double>& x) {
  if (!name.ends_with("c_attn.bias")) return;
  const KeyBias k = key_bias(config);
  for (std::int64_t e = 0; e < static_cast<std::int64_t>(x.size()); ++e) {
    if (e % k.stride >= k.begin && e % k.stride < k.end) x[static_cast<std::size_t>(e)] = 0;
  }
}

void compare_gradients(Report& report, const ParameterTable& table, const ModelConfig& config, const Whole& got,
                       const std::vector<std::vector<double>>& want, const Path& path) {
  const Tolerance most = tolerance(path);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::string& name = table.parameters[i].name;
    std::vector<double> x = widened(got[i]), ref = want[i];
    const double whole = norm(x);
    clear_key_bias(config, name, x);
    clear_key_bias(config, name, ref);
    if (most.error == 1e-5) {
      const double rest = norm(x), key = std::sqrt(std::max(0.0, whole * whole - rest * rest));
      report.expect(key <= 1e-6 * whole || whole == 0, name, " has a K part of ", key, " in a norm of ", whole);
    }
    if (norm(ref) == 0) {
      report.expect(whole == 0, name, " has a gradient of norm ", whole, " where there is none");
      continue;
    }
    const Difference d = difference(std::vector<float>(x.begin(), x.end()), ref);
    report.expect(d.relative_l2 <= most.error && std::abs(d.ratio - 1) <= most.ratio, name, " is ", d.ratio,
                  " of the gradient of one process, relative error ", d.relative_l2);
  }
}

namespace {

// What one process computes: the gradient, the weights after w -= lr * coefficient * g, and the results of a step from
// each. Its micro-batches have no more tokens than the head takes at once.
struct OneProcess {
  OneProcess(const Model& model, const HostBatch& batch, const Path& path, double clip) {
    Path alone;
    alone.dtype = path.dtype;
    alone.micro_batches = std::max<std::int64_t>(1, batch.rows * batch.seq_len / 256);
    const std::unique_ptr<Mesh> mesh = Mesh::single();
    Trial trial(*mesh, model, alone.settings(batch.rows, batch.seq_len));
    const HostRows rows{batch.ids.data(), batch.labels.data(), batch.rows};
    first = trial.step.gradients(rows, seed, 0);
    Whole g = trial.gradients(), w = trial.masters();
    limit = clip * first.grad_norm;
    coefficient = limit > 0 ? std::min(1.0, clip) : 1.0;
    lr = first.grad_norm > 0 ? 2 / first.grad_norm : 1;  // a change of the size of the weights' tenth
    for (std::size_t i = 0; i < w.size(); ++i) {
      for (std::size_t e = 0; e < w[i].size(); ++e)
        w[i][e] = static_cast<float>(static_cast<double>(w[i][e]) - lr * coefficient * static_cast<double>(g[i][e]));
      gradients.push_back(widened(g[i]));
      weights.push_back(widened(w[i]));
    }
    trial.weights.load([&](std::size_t i, std::int64_t from, std::int64_t count, float* out) {
      std::copy_n(w[i].begin() + from, count, out);
    });
    second = trial.step.gradients(rows, seed, 1);
  }
  StepResult first, second;
  std::vector<std::vector<double>> gradients, weights;
  double limit = 0, coefficient = 1, lr = 0;
};

// The numbers of a result, which every rank must have alike.
struct Numbers {
  explicit Numbers(const StepResult& r = {})
      : loss(r.loss),
        norm(r.grad_norm),
        coefficient(r.clip_coef),
        good(r.good_tokens),
        hash(r.batch_hash),
        outcome(static_cast<std::int64_t>(r.outcome)) {}
  double loss, norm, coefficient;
  std::int64_t good;
  std::uint64_t hash;
  std::int64_t outcome;
  bool operator==(const Numbers&) const = default;
};

void expect_alike(Communicator& group, Report& report, const StepResult& result) {
  const std::vector<Numbers> all = group.exchange(Numbers(result));
  for (std::size_t r = 1; r < all.size(); ++r)
    report.expect(all[r] == all[0], "rank ", r, " has another loss, norm, coefficient or count than rank 0");
}

// Memory by kind, and what a step moves in the groups where that does not depend on its labels.
struct Cost {
  Cost(const Device& device, const Mesh& mesh)
      : memory(device.memory()), shard(mesh.shard->traffic().operations), sp(mesh.sp->traffic().operations) {
    memory[static_cast<std::size_t>(Kind::kernel_scratch)] = 0;  // of the largest operation; labels decide which
    for (auto* operations : {&shard, &sp}) {
      for (auto& [name, count] : *operations) count.seconds = 0;
    }
  }
  std::array<std::int64_t, kind_count> memory;
  std::map<std::string, Traffic::Count> shard, sp;
};

// Of this rank's step as `plan` finds it, on a dry device and recording groups.
Cost planned(const Layout& layout, const ModelConfig& config, const StepSettings& settings, const Path& path) {
  const std::unique_ptr<Mesh> mesh = Mesh::recording(layout);
  const std::unique_ptr<Device> device = make_cpu_device(1, true);
  ModelWeights weights(*device, *mesh, config, settings.zero);
  Step(weights, settings).run_empty(path.micro_batches);
  return {*device, *mesh};
}

}  // namespace

void compare_step(Communicator& group, Report& report, const Model& model, const HostBatch& batch, const Path& path,
                  double clip) {
  struct Chosen {
    double limit, lr;
  } chosen{};
  const bool root = group.rank() == 0;
  std::optional<OneProcess> one;
  if (root) {
    one.emplace(model, batch, path, clip);
    chosen = {one->limit, one->lr};
  }
  chosen = group.exchange(chosen)[0];

  const Layout layout{path.dp, path.sp, path.tp, group.rank()};
  Mesh mesh(group, layout);
  StepSettings settings = path.settings(batch.rows, batch.seq_len);
  settings.clip_norm = chosen.limit;
  Trial trial(mesh, model, settings);
  for (Communicator* part : mesh.groups()) part->reset_traffic();
  const StepResult result = trial.step.run(batch.of_rank(layout), seed, 0, chosen.lr);
  const Cost cost(*trial.device, mesh), plan = planned(layout, model.config, settings, path);
  report.expect(cost.memory == plan.memory, "memory is not what was planned");
  if (result.outcome == StepResult::Outcome::updated)
    report.expect(cost.shard == plan.shard && cost.sp == plan.sp, "collectives are not those that were planned");
  for (Communicator* part : {mesh.tp.get(), mesh.sp.get(), mesh.dp.get(), mesh.shard.get()}) {
    if (part == mesh.tp.get() && path.tp == 3) continue;  // its pieces are uneven
    const std::vector<std::uint64_t> order = part->exchange(part->order_hash());
    report.expect(std::count(order.begin(), order.end(), order[0]) == part->size(), "ranks of ", part->name(),
                  " call other collectives");
  }
  expect_alike(group, report, result);
  const Whole gradients = trial.gradients(), weights = trial.masters();
  const StepResult next = trial.step.gradients(batch.of_rank(layout), seed, 1);
  expect_alike(group, report, next);
  check_replicas(*trial.device, mesh, trial.weights.place(), trial.weights.units(), path.stage);
  if (!root) return;

  // A norm of many tensors is as good as they are on average; the second step starts from weights that differ.
  const bool f32 = path.dtype == DType::float32 && path.wire == DType::float32;
  const double close = f32 ? 1e-5 : 1e-2;
  const auto expect_number = [&](const char* what, double got, double want, double relative) {
    report.expect(near(got, want, relative), what, " ", got, ", one process has ", want);
  };
  const std::int64_t ignored = std::count(batch.labels.begin(), batch.labels.end(), -100);
  const std::int64_t good = batch.rows * batch.seq_len - ignored;
  report.expect(result.good_tokens == good, "N is ", result.good_tokens, ", there are ", good, " good tokens");
  report.expect(result.batch_hash == one->first.batch_hash, "the batch is not that of one process");
  report.expect(result.outcome == (good > 0 ? StepResult::Outcome::updated : StepResult::Outcome::no_good_tokens),
                "the step's outcome is another");
  expect_number("loss", result.loss, one->first.loss, path.dtype == DType::float32 ? 1e-5 : close);
  expect_number("norm", result.grad_norm, one->first.grad_norm, close);
  expect_number("coefficient", result.clip_coef, one->coefficient, clip == 0.5 ? close : 0);
  for (const std::vector<double>& g : one->gradients) report.expect((norm(g) > 0) == (good > 0), "a gradient of 0");
  compare_gradients(report, trial.weights.table(), model.config, gradients, one->gradients, path);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Difference d = difference(weights[i], one->weights[i]);
    report.expect(d.relative_l2 <= (f32 ? 1e-5 : 2e-2), trial.weights.table().parameters[i].name,
                  " after the step differs by ", d.relative_l2);
  }
  expect_number("the next step's loss", next.loss, one->second.loss, close);
  expect_number("the next step's norm", next.grad_norm, one->second.grad_norm, f32 ? 1e-4 : 4e-2);
}

}  // namespace onescale::parity

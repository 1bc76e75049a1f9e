// The trainer over ranks against the numbers of transformers.
#include "tests/train/golden.h"
#include "parallel/json.h"
#include "tests/parity/jobs.h"
#include "tests/parity/trial.h"
#include "train/schedule.h"

namespace onescale::parity {

namespace {

Path path(int dp, int sp, int tp, int stage, Reduction reduction, double bucket, std::int64_t micro_batches = 1,
          SpMode mode = SpMode::ulysses, Recompute recompute = Recompute::none) {
  Path p;
  p.dp = dp, p.sp = sp, p.tp = tp, p.stage = stage, p.reduction = reduction, p.bucket = bucket;
  p.micro_batches = micro_batches, p.sp_mode = mode, p.recompute = recompute;
  return p;
}

constexpr Reduction ordered = Reduction::ordered, scatter = Reduction::reduce_scatter, all = Reduction::all_reduce;

void gradients(Communicator& group, Report& report, const std::string& name, const Path& p) {
  report.begin(str(name, " ", p.text()));
  const Golden golden(name);
  const HostBatch batch = read_batch(golden.dir + "/batch.safetensors", golden.source.config());
  const Layout layout{p.dp, p.sp, p.tp, group.rank()};
  Mesh mesh(group, layout);
  Trial trial(mesh, {golden.source.config(), golden.source.fetch()}, p.settings(batch.rows, batch.seq_len));
  const StepResult result = trial.step.gradients(batch.of_rank(layout), seed, 0);
  const Whole got = trial.gradients();
  report.expect(result.good_tokens == Golden::ids(golden.expect, "good_tokens")[0], "N is ", result.good_tokens);
  report.expect(near(result.loss, golden.values("loss")[0], 1e-5), "loss ", result.loss);
  report.expect(near(result.grad_norm, golden.values("grad_norm")[0], tolerance(p).ratio), "norm ", result.grad_norm);
  std::vector<std::vector<double>> want;
  for (const Parameter& parameter : trial.weights.table().parameters)
    want.push_back(golden.values("grad." + parameter.name));
  compare_gradients(report, trial.weights.table(), golden.source.config(), got, want, p);
}

void six_steps(Communicator& group, Report& report, const Path& p) {
  report.begin(str("steps ", p.text()));
  const Golden golden("steps");
  const SafetensorsReader file(golden.dir + "/batch.safetensors");
  const std::vector<std::int32_t> ids = Golden::ids(file, "input_ids"), labels = Golden::ids(file, "labels");
  const Json json = Json::read_file(golden.dir + "/steps.json");
  Options options;
  options.steps = json.at("steps").integer();
  options.lr = json.at("lr").number();
  options.min_lr = json.at("min_lr").number();
  options.warmup_steps = json.at("warmup_steps").integer();
  const std::int64_t rows = json.at("rows_per_step").integer(), T = json.at("seq_len").integer(), n = rows * T;
  const auto f = [&](const char* key) { return static_cast<float>(json.at(key).number()); };
  StepSettings settings = p.settings(rows, T);
  settings.optimizer = {true, f("beta1"), f("beta2"), f("eps"), f("weight_decay")};
  settings.clip_norm = json.at("clip_norm").number();
  const Layout layout{p.dp, p.sp, p.tp, group.rank()};
  Mesh mesh(group, layout);
  Trial trial(mesh, {golden.source.config(), golden.source.fetch()}, settings);
  for (std::int64_t s = 0; s < options.steps; ++s) {
    const auto at = static_cast<std::size_t>(s);
    const HostBatch batch{rows,
                          T,
                          {ids.begin() + s * n, ids.begin() + (s + 1) * n},
                          {labels.begin() + s * n, labels.begin() + (s + 1) * n}};
    const StepResult result = trial.step.run(batch.of_rank(layout), 0, s, learning_rate(options, s));
    report.expect(result.good_tokens == Golden::ids(golden.expect, "good_tokens")[at], "N of step ", s);
    report.expect(near(result.loss, golden.values("loss")[at], 1e-5), "loss of step ", s, " ", result.loss);
    report.expect(near(result.grad_norm, golden.values("grad_norm")[at], 1e-5), "norm of step ", s);
    report.expect(near(result.clip_coef, golden.values("clip_coef")[at], 1e-5), "coefficient of step ", s);
  }
  const Whole got = trial.masters();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::string& name = trial.weights.table().parameters[i].name;
    std::vector<double> x = widened(got[i]), want = golden.values("weight." + name);
    clear_key_bias(golden.source.config(), name, x);
    clear_key_bias(golden.source.config(), name, want);
    const Difference d = difference(std::vector<float>(x.begin(), x.end()), want);
    report.expect(d.relative_l2 < 1e-5, name, " after six steps differs by ", d.relative_l2);
  }
}

}  // namespace

void add_golden(Jobs& jobs) {
  const auto add_gradients = [&](const char* name, const Path& p) {
    jobs.push_back({p.world(), [=](Communicator& group, Report& report) { gradients(group, report, name, p); }});
  };
  for (const char* name : {"mqa", "mha", "erf_noscale", "wide_mqa", "wide_mha"}) {
    add_gradients(name, path(1, 1, 1, 0, ordered, 0));
  }
  // Three rows, 13 tokens, an inner size of 37: only dp divides them; where that is 192, tp too.
  for (const int tp : {2, 4}) add_gradients("erf_noscale", path(1, 1, tp, 0, ordered, 0));
  add_gradients("erf_noscale", path(3, 1, 2, 3, scatter, 100));
  for (int stage = 0; stage < 4; ++stage) {
    add_gradients("mqa", path(3, 1, 1, stage, ordered, 100));
    add_gradients("mha", path(3, 1, 1, stage, scatter, 1000));
  }
  for (const char* name : {"wide_mqa", "wide_mha"}) {
    for (const Reduction reduction : {ordered, scatter, all}) {
      Path rounded = path(2, 2, 1, 2, reduction, 1000, 2);
      rounded.wire = DType::bfloat16;
      add_gradients(name, rounded);
    }
    add_gradients(name, path(4, 1, 1, 0, all, 3000));
    add_gradients(name, path(2, 2, 1, 1, ordered, 1000));
    add_gradients(name, path(1, 4, 1, 2, scatter, 3000, 4));
    add_gradients(name, path(1, 4, 1, 3, ordered, 0, 2, SpMode::gather_kv));
    add_gradients(name, path(1, 1, 4, 0, ordered, 0));
    add_gradients(name, path(2, 1, 2, 3, scatter, 1000, 2));
    add_gradients(name, path(1, 2, 2, 3, ordered, 0, 4));
    add_gradients(name, path(2, 2, 2, 3, ordered, 3000, 2));
  }

  const Path steps[] = {
      path(8, 1, 1, 1, scatter, 3000),    path(4, 2, 1, 3, ordered, 0),
      path(2, 2, 2, 2, ordered, 3000, 2), path(1, 4, 2, 3, all, 0, 4, SpMode::gather_kv, Recompute::block),
      path(1, 1, 8, 0, ordered, 0),       path(1, 8, 1, 1, ordered, 3000),
      path(4, 1, 1, 0, ordered, 3000),    path(2, 2, 1, 1, all, 3000, 2, SpMode::gather_kv),
      path(2, 1, 2, 2, scatter, 3000, 4), path(1, 2, 2, 3, scatter, 0, 2, SpMode::ulysses, Recompute::light),
      path(1, 1, 4, 0, ordered, 0, 8),    path(1, 4, 1, 0, scatter, 0, 1, SpMode::gather_kv),
      path(2, 1, 1, 3, ordered, 3000, 4), path(1, 2, 1, 2, all, 3000, 2),
      path(1, 1, 2, 0, ordered, 0, 2)};
  for (const Path& p : steps) {
    jobs.push_back({p.world(), [=](Communicator& group, Report& report) { six_steps(group, report, p); }});
  }
}

}  // namespace onescale::parity

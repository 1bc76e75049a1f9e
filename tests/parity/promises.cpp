// Promises beyond one step's agreement: bits, odd sizes, ranks that go wrong, many steps together.
#include <cmath>
#include <cstring>
#include <optional>

#include "data/batches.h"
#include "parallel/replicas.h"
#include "tests/parity/jobs.h"
#include "tests/parity/trial.h"
#include "tests/temp_dir.h"
#include "tests/train/golden.h"
#include "train/evaluate.h"
#include "train/verify.h"

namespace onescale::parity {

namespace {

HostBatch random_batch(std::int64_t rows, std::int64_t seq_len, std::int64_t vocab, std::uint64_t key,
                       bool all_good = false) {
  HostBatch batch{rows, seq_len, {}, {}};
  for (std::int64_t i = 0; i < rows * seq_len; ++i) {
    const Philox words = philox({static_cast<std::uint32_t>(i), 0, 0, 0}, key);
    batch.ids.push_back(static_cast<std::int32_t>(words[0] % static_cast<std::uint32_t>(vocab)));
    // Rows differ in how much of them is ignored, from a third to almost all.
    const bool good = all_good || words[1] % 10 < 7 - i / seq_len % 7;
    batch.labels.push_back(good ? static_cast<std::int32_t>(words[2] % static_cast<std::uint32_t>(vocab)) : -100);
  }
  return batch;
}

// With the ordered reduction: all bucket sizes, whatever is recomputed, stages 0 to 3 with one micro-batch, 0 and 1 and
// 2 and 3 with more.
void same_bits(Communicator& group, Report& report, Path path) {
  const Model model = small_model(path.sp_mode == SpMode::gather_kv, true, true);
  const HostBatch batch = random_batch(8, 16, model.config.vocab_size, 1);
  const Layout layout{path.dp, path.sp, path.tp, group.rank()};
  Mesh mesh(group, layout);
  struct Bits {
    StepResult result;
    Whole gradients;
  };
  std::vector<std::optional<Bits>> first(2);
  for (const int stage : {0, 1, 2, 3}) {
    path.recompute = static_cast<Recompute>(stage % 3);
    for (const double bucket : {0.0, 10.0, 700.0, 5000.0}) {
      if (bucket == 10 && path.world() > 4) continue;  // thousands of collectives
      path.stage = stage, path.bucket = bucket;
      report.begin(str("bits ", path.text()));
      Trial trial(mesh, model, path.settings(batch.rows, batch.seq_len));
      const Bits bits{trial.step.gradients(batch.of_rank(layout), seed, 0), trial.gradients()};
      std::optional<Bits>& as = first[path.micro_batches > 1 && stage >= 2 ? 1 : 0];
      if (!as) as = bits;
      report.expect(bits.gradients == as->gradients, "gradients have other bits");
      report.expect(bits.result.loss == as->result.loss && bits.result.grad_norm == as->result.grad_norm,
                    "loss or norm has other bits");
    }
  }
}

// One rank's copy of a weight is not finite: no rank changes its weights.
void not_finite(Communicator& group, Report& report, const Path& path) {
  report.begin(str("not finite ", path.text()));
  const Model model = small_model(true, true, false);
  const HostBatch batch = random_batch(8, 16, model.config.vocab_size, 1);
  const Layout layout{path.dp, path.sp, path.tp, group.rank()};
  Mesh mesh(group, layout);
  Trial trial(mesh, model, path.settings(batch.rows, batch.seq_len));
  if (group.rank() == group.size() - 1)
    trial.weights.units().master(1).data.as<float>()[2] = std::numeric_limits<float>::infinity();
  const Whole before = trial.masters();
  const StepResult result = trial.step.run(batch.of_rank(layout), seed, 0, 0.1);
  report.expect(result.outcome == StepResult::Outcome::not_finite, "the step was not skipped, norm ", result.grad_norm);
  report.expect(trial.masters() == before, "weights changed");
  report.expect(trial.step.optimizer().updates() == 0, "the step was counted");
}

void altered_replica(Communicator& group, Report& report, const Path& path) {
  report.begin(str("replicas ", path.text()));
  const Model model = small_model(true, true, false);
  const HostBatch batch = random_batch(8, 16, model.config.vocab_size, 1);
  const Layout layout{path.dp, path.sp, path.tp, group.rank()};
  Mesh mesh(group, layout);
  Trial trial(mesh, model, path.settings(batch.rows, batch.seq_len));
  for (int step = 0; step < 3; ++step) trial.step.run(batch.of_rank(layout), seed, step, 0.1);
  const auto alike = [&] {
    try {
      check_replicas(*trial.device, mesh, trial.weights.place(), trial.weights.units(), path.stage);
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  report.expect(alike(), "replicas differ after three steps");
  if (group.rank() == group.size() - 1) {
    // wpe's last element of this rank, held by all: by the whole weights in stages 0 to 2, by tp's ranks in stage 3.
    const Placement& place = trial.weights.place();
    const Owned owned = trial.weights.units().master(0);
    const std::int64_t last = place.flat.offset[1] + place.table().parameters[1].numel();
    const Tensor part = owned.part({0, 0, last});
    float& element = part.as<float>()[part.numel() - 1];
    element = std::nextafter(element, 10.0f);
  }
  report.expect(!alike(), "an altered weight is not noticed");
}

// Accumulation, dropout, recomputation, uneven labels, AdamW and clipping together.
void long_run(Communicator& group, Report& report, const Path& path) {
  report.begin(str("20 steps ", path.text()));
  const Model model = small_model(true, true, true);
  StepSettings settings = path.settings(16, 16), alone = Path{}.settings(16, 16);
  for (StepSettings* s : {&settings, &alone}) s->optimizer = {true, 0.9f, 0.95f, 1e-8f, 0.1f}, s->clip_norm = 0.5;
  const Layout layout{path.dp, path.sp, path.tp, group.rank()};
  Mesh mesh(group, layout);
  Trial trial(mesh, model, settings);
  const std::unique_ptr<Mesh> single = Mesh::single();
  std::optional<Trial> one;
  if (group.rank() == 0) one.emplace(*single, model, alone);
  for (std::int64_t step = 0; step < 20; ++step) {
    const HostBatch batch = random_batch(16, 16, model.config.vocab_size, static_cast<std::uint64_t>(step));
    const StepResult got = trial.step.run(batch.of_rank(layout), seed, step, 1e-3);
    if (!one) continue;
    const StepResult want = one->step.run({batch.ids.data(), batch.labels.data(), batch.rows}, seed, step, 1e-3);
    report.expect(got.good_tokens == want.good_tokens, "N of step ", step);
    report.expect(near(got.loss, want.loss, 1e-5), "loss of step ", step, " ", got.loss, ", not ", want.loss);
    report.expect(near(got.grad_norm, want.grad_norm, 1e-4), "norm of step ", step, " ", got.grad_norm, ", not ",
                  want.grad_norm);
    report.expect(near(got.clip_coef, want.clip_coef, 1e-4), "coefficient of step ", step);
  }
  const Whole got = trial.masters();
  if (!one) return;
  const Whole want = one->masters();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::string& name = trial.weights.table().parameters[i].name;
    std::vector<double> x = widened(got[i]), ref = widened(want[i]);
    clear_key_bias(model.config, name, x);
    clear_key_bias(model.config, name, ref);
    const Difference d = difference(std::vector<float>(x.begin(), x.end()), ref);
    // Adam divides by the root of the second moment: elements with small gradients amplify rounding.
    report.expect(d.relative_l2 < 1e-4, name, " after 20 steps differs by ", d.relative_l2);
  }
}

// The gradient beside the slopes of a plain float64 forward; nothing of the trainer is on their side.
void beside_plain(Communicator& group, Report& report, const Model& model, const std::vector<Path>& paths) {
  const HostBatch batch = random_batch(4, 16, model.config.vocab_size, 3);
  std::vector<Slopes> slopes;
  if (group.rank() == 0)
    slopes = plain_slopes({model.config, model.fetch, batch, {}}, tensor_parts(model.config, batch.seq_len));
  for (const Path& path : paths) {
    report.begin(str("slopes ", path.text(), model.config.multi_query ? " mqa" : " mha"));
    const Layout layout{path.dp, path.sp, path.tp, group.rank()};
    Mesh mesh(group, layout);
    Trial trial(mesh, model, path.settings(batch.rows, batch.seq_len));
    trial.step.gradients(batch.of_rank(layout), seed, 0);
    const auto [error, part] = worst_slope(slopes, trial.gradients());
    report.expect(error <= 2e-5, part, " has another slope, by ", error, " of its norm");
  }
}

// First weights have the bits of one process's, and the loss over held-out rows, of which the last is short, is that of
// a plain forward: with rows for some ranks alone, too.
void beginning_and_evaluation(Communicator& group, Report& report, const Path& path) {
  report.begin(str("evaluation ", path.text()));
  Model model = small_model(true, true, false);
  const std::int64_t V = model.config.vocab_size, T = 16, tokens = 5 * T + 4;
  const Layout layout{path.dp, path.sp, path.tp, group.rank()};
  Mesh mesh(group, layout);
  Trial trial(mesh, model, path.settings(8, T));
  trial.weights.initialise(seed);
  const Whole first = trial.masters();
  trial.weights.load(model.fetch);
  const std::unique_ptr<TempDir> dir = group.rank() == 0 ? std::make_unique<TempDir>() : nullptr;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> no_target;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const Philox words = philox({static_cast<std::uint32_t>(i), 0, 0, 0}, 6);
    ids.push_back(static_cast<std::int32_t>(words[0] % static_cast<std::uint32_t>(V)));
    no_target.push_back(words[1] % 3 == 0);
  }
  char path_of[256] = "";
  if (dir) {
    ShardWriter shard(*dir / "val_000000.bin", {V, 0, {}});
    for (std::size_t i = 0; i < ids.size(); ++i) shard.add(std::span(ids).subspan(i, 1), no_target[i]);
    shard.end_document();
    shard.finish();
    std::snprintf(path_of, sizeof path_of, "%s", dir->path().c_str());
  }
  struct Text {
    char text[256];
  } shared{};
  std::memcpy(shared.text, path_of, sizeof path_of);
  const std::string where = group.exchange(shared)[0].text;
  const Dataset data(where, "val", {V, 0, {}});
  Batches batches(data, T, 0, SampleOrder::sequential);
  for (const std::int64_t rows : {0, 3}) {
    Evaluator evaluator(trial.weights, trial.step.model(), 8 / path.dp / path.micro_batches, T);
    const EvalResult result = evaluator.run(batches, nullptr, rows, [] { return false; });
    if (!dir) continue;
    HostBatch batch{rows == 0 ? 6 : rows, T, {}, {}};
    for (std::size_t i = 0; i < static_cast<std::size_t>(batch.rows * T); ++i) {
      batch.ids.push_back(i < ids.size() ? ids[i] : 0);
      batch.labels.push_back(i + 1 < ids.size() && !no_target[i + 1] ? ids[i + 1] : -100);
    }
    const VerifyCase c{model.config, model.fetch, batch, {}};
    report.expect(near(result.loss(), plain_loss(c, plain_weights(c)), 1e-5), "loss ", result.loss());
    const std::int64_t good = count_good_tokens(batch.labels.data(), std::ssize(batch.labels));
    report.expect(result.good_tokens == good, "N is ", result.good_tokens, ", not ", good);
  }
  if (!dir) return;
  const std::unique_ptr<Mesh> single = Mesh::single();
  Trial one(*single, model, Path{}.settings(8, T));
  one.weights.initialise(seed);
  report.expect(first == one.masters(), "first weights have other bits");
}

Path with(int dp, int sp, int tp, int stage, std::int64_t micro_batches = 1, SpMode mode = SpMode::ulysses) {
  Path p;
  p.dp = dp, p.sp = sp, p.tp = tp, p.stage = stage, p.micro_batches = micro_batches, p.sp_mode = mode;
  return p;
}

void add(Jobs& jobs, void (*run)(Communicator&, Report&, const Path&), const Path& path) {
  jobs.push_back({path.world(), [=](Communicator& group, Report& report) { run(group, report, path); }});
}

}  // namespace

void add_bits(Jobs& jobs) {
  const auto run = [](Communicator& group, Report& report, const Path& path) { same_bits(group, report, path); };
  for (const std::int64_t micro_batches : {1, 2}) {
    add(jobs, run, with(2, 1, 1, 0, micro_batches));
    add(jobs, run, with(1, 2, 1, 0, micro_batches, SpMode::gather_kv));
    add(jobs, run, with(4, 1, 1, 0, micro_batches));
    add(jobs, run, with(2, 1, 2, 0, micro_batches, SpMode::gather_kv));
    add(jobs, run, with(2, 2, 2, 0, micro_batches));
  }
}

void add_odd_sizes(Jobs& jobs) {
  const auto compare = [&](const Path& path, std::int64_t heads, std::int64_t vocab, float scale) {
    jobs.push_back({path.world(), [=](Communicator& group, Report& report) {
                      report.begin(str(heads, " heads, vocabulary ", vocab, " ", path.text()));
                      const Model model = other_model(heads, vocab, scale);
                      compare_step(group, report, model, random_batch(8, 16, vocab, 2), path, 0);
                    }});
  };
  // Logits near 0, those of the padding: a padded row would add 1 to the 99 of the softmax's sum, and the maximum of
  // many rows is negative.
  for (const int tp : {2, 4}) compare(with(1, 1, tp, 0), 8, 99, 1e-3f);
  compare(with(2, 1, 4, 1), 8, 99, 1e-3f);
  compare(with(1, 1, 8, 0), 8, 3, 0.2f);  // ranks without any id
  // 104 K/V elements, of which 3 ranks have no equal shares.
  for (const int stage : {0, 3}) compare(with(2, 1, 3, stage), 6, 27, 0.2f);
  compare(with(1, 2, 1, 1, 1, SpMode::gather_kv), 22, 27, 0.2f);
  compare(with(1, 4, 1, 3, 2, SpMode::gather_kv), 22, 27, 0.2f);
  compare(with(1, 2, 2, 2, 1, SpMode::gather_kv), 22, 27, 0.2f);
}

void add_broken_ranks(Jobs& jobs) {
  for (int stage = 0; stage < 4; ++stage) {
    add(jobs, not_finite, with(2, 1, 1, stage));
    add(jobs, not_finite, with(1, 2, 2, stage));
    add(jobs, altered_replica, with(1, 2, 2, stage));
    if (stage < 3) add(jobs, altered_replica, with(2, 1, 1, stage));
  }
  add(jobs, not_finite, with(1, 1, 4, 0));
  add(jobs, not_finite, with(2, 2, 2, 1));
  add(jobs, altered_replica, with(1, 1, 2, 0));
}

void add_long_run(Jobs& jobs) {
  for (Path path : {with(4, 1, 1, 3, 2), with(1, 2, 2, 3, 4), with(2, 2, 1, 3, 2, SpMode::gather_kv)}) {
    path.recompute = Recompute::block;
    path.bucket = 1000;
    add(jobs, long_run, path);
  }
}

void add_chunks(Jobs& jobs) {
  for (const bool tied : {true, false}) {
    for (const Path& path :
         {with(1, 1, 1, 0), with(2, 1, 1, 2), with(1, 2, 1, 1), with(1, 1, 2, 0), with(1, 1, 2, 0, 2)})
      jobs.push_back({path.world(), [=](Communicator& group, Report& report) {
                        report.begin(str("768 good tokens ", path.text(), tied ? " tied" : " untied"));
                        const Model model = small_model(true, tied, true);
                        compare_step(group, report, model, random_batch(48, 16, model.config.vocab_size, 4, true), path,
                                     0);
                      }});
  }
}

void add_wire(Jobs& jobs) {
  for (const Reduction reduction : {Reduction::ordered, Reduction::reduce_scatter, Reduction::all_reduce}) {
    for (Path path : {with(2, 1, 1, 0, 2), with(2, 1, 1, 1, 4), with(1, 2, 1, 2, 2), with(2, 1, 1, 3, 4),
                      with(2, 2, 2, 2, 2), with(4, 1, 2, 3, 2), with(1, 4, 1, 1, 2, SpMode::gather_kv)}) {
      path.reduction = reduction;
      path.wire = DType::bfloat16;
      path.bucket = 1000;
      jobs.push_back({path.world(), [=](Communicator& group, Report& report) {
                        report.begin(path.text());
                        const Model model = small_model(true, false, true);
                        compare_step(group, report, model, random_batch(16, 16, model.config.vocab_size, 5), path, 0.5);
                      }});
    }
  }
}

void add_plain(Jobs& jobs) {
  // The golden models have scaled scores and tied heads in most layouts.
  for (const bool multi_query : {true, false}) {
    jobs.push_back({4, [=](Communicator& group, Report& report) {
                      Model model = small_model(multi_query, multi_query, false);
                      model.config.gelu = multi_query ? Gelu::erf : Gelu::tanh;
                      model.config.scale_attn_weights = false;
                      beside_plain(group, report, model,
                                   {with(1, 1, 4, 0), with(1, 4, 1, 3), with(1, 4, 1, 2, 2, SpMode::gather_kv),
                                    with(2, 1, 2, 3, 2), with(1, 2, 2, 1, 4)});
                    }});
  }
}

void add_evaluation(Jobs& jobs) {
  for (const Path& path : {with(1, 1, 1, 0, 4), with(2, 1, 1, 1), with(4, 1, 1, 3), with(1, 2, 1, 2), with(1, 1, 4, 0),
                           with(2, 2, 1, 3), with(2, 2, 2, 3), with(1, 4, 1, 0, 1, SpMode::gather_kv)})
    add(jobs, beginning_and_evaluation, path);
}

}  // namespace onescale::parity

// The tables of `onescale verify` on small models, one or a few a function.

#include "model/parameters.h"
#include "parallel/clip_norm.h"
#include "train/verify_sheet.h"

namespace onescale {

namespace {

constexpr Layout one{1, 1, 1, 0}, dp2{2, 1, 1, 0}, sp2{1, 2, 1, 0}, sp4{1, 4, 1, 0}, tp2{1, 1, 2, 0}, tp4{1, 1, 4, 0},
    dp2_tp2{2, 1, 2, 0}, sp2_tp2{1, 2, 2, 0};

Judge loss_is(double right) {
  return [=](const Measured& m) { return Figures{{"loss", m.result.loss, right, 1e-5, "%.4f"}}; };
}

// That nothing was updated, for this reason.
Figures skipped(const Measured& m, StepResult::Outcome reason, const char* format) {
  double moved = 0;
  for (const auto& g : m.gradient)
    moved += static_cast<double>(std::ranges::count_if(g, [](float x) { return std::abs(x) > 0; }));
  return {{"step skipped", m.result.outcome == reason ? 1.0 : 0.0, 1, 0}, {"weights that moved", moved, 0, 0, format}};
}

void one_process(Sheet& s, const Options& plain) {
  s.title("One process beside a plain float64 forward without the trainer's code: slopes in every part of every tensor",
          "");
  const auto variant = [&](const std::string& name, const VerifyCase& c, std::initializer_list<int> repetitions) {
    const std::vector<Slopes> slopes = plain_slopes(c, tensor_parts(c.config, c.batch.seq_len));
    for (const int times : repetitions) {  // 8: more good tokens than the head takes at once
      const Measured exact = measure_alone(s.world, repeated(c, times));
      const auto [error, part] = worst_slope(slopes, exact.gradient);
      double square = 0;
      for (const std::vector<float>& g : exact.gradient) square += squares(g);
      // The gradient is of float32: some 1e-6 of a tensor's norm, and more of the least of its parts.
      s.line(str(name, ", ", exact.result.good_tokens, " good tokens"),
             s.figures(name, {{"loss", exact.result.loss / plain_loss(c, plain_weights(c)), 1, 1e-5, "loss %.6f"},
                              {"slope of " + part, error, 0, 2e-5, ", slopes %.0e off at most"},
                              {"norm", exact.result.grad_norm / std::sqrt(square), 1, 1e-5, ", norm %.6f"}})
                 .text);
    }
  };
  if (!s.root()) return;
  VerifyCase other = small_case(plain, 1, false, false);
  other.config.gelu = Gelu::erf;
  other.config.scale_attn_weights = false;
  VerifyCase dropout = small_case(plain, 1);
  dropout.config.embd_pdrop = dropout.config.resid_pdrop = dropout.config.attn_pdrop = 0.2f;
  variant("multi-query, tied, tanh", uneven(small_case(plain, 1)), {1, 8});
  variant("multi-head, untied, erf, not scaled", other, {1, 8});
  variant("dropout 0.2", dropout, {1});
}

void updates(Sheet& s, VerifyCase c) {
  s.title("Weights after 3 clipped steps with decay beside a plain float64 optimizer: the worst error over all layouts",
          "");
  c.options.clip_norm = 0.5 * s.world.exchange(measure_alone(s.world, c).result.grad_norm)[0];
  c.options.steps = 3;
  c.options.weight_decay = 0.1;
  c.options.eps = 1e-3;  // takes the K part of c_attn.bias, whose gradient is rounding, below the rest
  c.options.zero = 2;
  for (const std::string optimizer : {"sgd", "adamw"}) {
    c.options.given = {"reduction"};
    if (optimizer == "sgd") c.options.given.emplace_back("zero");  // the first table has it in all stages
    c.options.lr = optimizer == "sgd" ? 2 : 0x1p-5;                // rounded weights take some 1e-6 from their changes
    c.options.optimizer = optimizer;
    const WholeTensors right = plain_updates(s.world, c);
    const auto judge = [&](const Measured& m) {
      Figure most{"", 0, 0, 2e-5, "%.0e"};
      for (std::size_t i = 0; i < right.size(); ++i) {
        const Part part{gpt_bigcode_table(c.config).parameters[i].name, {{i, 0, std::ssize(right[i])}}};
        const Likeness l = likeness(part, m.gradient, right);
        const double error = std::hypot(l.residual, l.ratio - 1);
        if (worse(error, most.value)) most.value = error, most.name = "change of " + part.name;
      }
      return Figures{most};
    };
    s.line(optimizer, worst(s.everywhere(optimizer + ", ", c, judge)).text);
  }
}

void buckets(Sheet& s, VerifyCase c) {
  s.title("A parameter larger than its bucket takes no other path: weights / biases",
          "DeepSpeed 0.19.8, ZeRO-3, reduce_scatter off, local loss, measured: weight / bias");
  c.options.micro_batch = c.batch.rows;  // one reduction: small buckets are many messages
  for (const Layout& layout : {sp2, sp4}) {
    c.options.bucket_mb = 10 * 4 / 1048576.0;
    s.gradient("bucket of 10 elements, ZeRO-0 to 3", layout, c, layout.sp == 2 ? "0.5 / 1" : "0.25 / 1");
    const std::string what = str("buckets of 3, 17, 1000 and 10^9 elements, sp=", layout.sp);
    s.row(what, layout, "", [&] {
      c.options.zero = 3;
      WholeTensors first;
      double equal = 0, runs = 0;
      Cell cell;
      for (const double elements : {3.0, 17.0, 1000.0, 1e9}) {
        c.options.bucket_mb = elements * 4 / 1048576;
        cell = s.run(what, layout, c, [&](const Measured& m) {
          if (++runs == 1) first = m.gradient;
          equal += m.gradient == first;
          return Figures{{"equal bits", equal, runs, 0, "%.0f of 4 with the same bits"}};
        });
      }
      return cell.text;
    });
  }
}

void good_tokens(Sheet& s, const VerifyCase& full) {
  const std::int64_t T = full.batch.seq_len;
  s.title("Good tokens that differ between shards or replicas: weights / biases", "DeepSpeed 0.19.8, measured");
  s.gradient("shards with 1 and 3 good tokens", sp2,
             masked(full, 1, [=](auto, auto t) { return t == 1 || t >= T - 3; }),
             "0.6965 / 0.8648, residual 0.28 (mean of shard means / sp)");
  s.gradient("replicas with 1 and 3 good tokens", dp2,
             masked(full, 2, [](auto row, auto t) { return t < 1 + 2 * row; }),
             "1.0665 / 1.0411, residual 0.13 (replicas averaged)");

  s.title("Labels shifted inside each shard lose the target across its boundary", "DeepSpeed #5248, by its code");
  for (const Layout& layout : {sp2, sp4}) {
    const auto count = [right = static_cast<double>(T - 1)](const Measured& m) {
      return Figures{{"good tokens", static_cast<double>(m.result.good_tokens), right, 0, "%.0f"}};
    };
    s.steps(str("targets of a row of ", T, " tokens, sp=", layout.sp), layout,
            masked(full, 1, [=](auto, auto t) { return t + 1 < T; }), str(T - layout.sp), count);
    s.gradient("gradient of the one target across", layout,
               masked(full, 1, [=](auto, auto t) { return t == T / layout.sp - 1; }), "none: it is lost");
  }

  s.title("A shard, a replica, a micro-batch, a step without good tokens",
          "a mean over no token (pytorch #70348, transformers #47068)");
  const VerifyCase second = masked(full, 2, [](auto row, auto) { return row == 1; });
  s.gradient("all of shard 0 ignored", sp2, masked(full, 1, [=](auto, auto t) { return t >= T / 2; }),
             "NaN, also times 0");
  s.gradient("all of replica 0 ignored", dp2, second, "NaN");
  s.gradient("all of micro-batch 0 ignored", one, second, "NaN");
  const auto nothing = [](const Measured& m) {
    Figures figures = skipped(m, StepResult::Outcome::no_good_tokens, ", %.0f weights moved");
    figures.insert(figures.begin(),
                   {{"loss", m.result.loss, 0, 0, "loss %.0f"}, {"norm", m.result.grad_norm, 0, 0, ", norm %.0f"}});
    return figures;
  };
  for (const Layout& layout : {one, dp2, sp2, tp2})
    s.steps("every label ignored, " + layout.text(), layout, masked(full, 2, [](auto, auto) { return false; }),
            "NaN, or a failed assertion (DeepSpeed #5223)", nothing);

  s.title("Accumulation is no mean of means: one part with 1 token of loss 4, one with 3 tokens of loss 1 each",
          "mean of means (transformers #34191)");
  VerifyCase known = known_losses(full, 2);
  for (const std::int64_t t : {0, 2, 3}) known.batch.labels[static_cast<std::size_t>(T + t)] = 1;
  known.batch.labels[1] = 0;
  for (const Layout& layout : {one, dp2, sp2, tp2, tp4})
    s.steps(str("loss, ", 2 / layout.dp, " micro-batches a rank, ", layout.text()), layout, known, "2.5000",
            loss_is(1.75));
  VerifyCase four = masked(full, 4, [](auto row, auto t) { return t <= 2 * row; });
  four.options.bucket_mb = 1000 * 4 / 1048576.0;  // some are reduced before the next micro-batch begins
  for (const std::int64_t rows : {2, 1}) {
    four.options.micro_batch = rows;
    for (const Layout& layout : {one, dp2})
      s.gradient(str("gradient, ", 4 / layout.dp / rows, " micro-batches a rank"), layout, four);
  }
}

void clipping(Sheet& s, VerifyCase c) {
  s.title("Steps over the exact gradient: a clip at 1.5 times the true norm must not act, one at half of it halves",
          "DeepSpeed 0.19.8, ALST's loss, measured");
  const double norm = s.world.exchange(measure_alone(s.world, c).result.grad_norm)[0];
  for (const Layout& layout : {one, dp2, sp2, tp2}) {
    c.options.clip_norm = 1.5 * norm;
    s.gradient("clip at 1.5 norms", layout, c, layout.sp == 2 ? "1.5 (ZeRO-0 to 2: clips twice the gradient)" : "");
    c.options.clip_norm = 0.5 * norm;
    s.gradient("clip at half the norm", layout, c, "", 0.5);
  }
}

// The trainer's gradients and norm over a fused projection whose gradient is written by hand: two Q rows of norms 3 and
// 4, four K/V rows of norm 12 together; each rank has a share of it.
std::string known_norm(Sheet& s, const Layout& layout, Options o) {
  const std::unique_ptr<Mesh> mesh = first_ranks(s.world, layout);
  if (!mesh) return "";
  const ParameterTable table{{{"c_attn.weight", {2 + 4, 4}, 0, TpRule::fused_qkv, 4, 0, 0, true}}, 1};
  const Placement place(table, mesh->layout);
  const auto shards = static_cast<float>(layout.shards()), tp = static_cast<float>(layout.tp);
  std::vector<float> values(20, 3 / tp / shards);
  std::fill_n(values.begin(), 4, (mesh->layout.tp_rank() == 0 ? 1.5f : 2.0f) / shards);
  std::vector<Cell> all;
  for (int run = 0; run < 8; ++run) {
    o.zero = run % 4;
    o.dtype = o.reduce_dtype = run < 4 ? "float32" : "bfloat16";
    const std::unique_ptr<Device> device = make_device(o, false);
    const auto gradients = make_gradients(*device, *mesh, place, step_settings(o, 1).zero);
    gradients->begin_step(1);
    device->upload(gradients->open(0).tensors[0], values.data());
    gradients->close(0);
    gradients->finish();
    const Tensor scratch = device->allocate(Kind::workspace, DType::float64, {1});
    const double norm = gradient_norm(*device, *mesh, place, *gradients, scratch);
    all.push_back(s.figures(
        str("norm, ", layout.text(), ", ZeRO-", o.zero, " ", o.dtype),
        {{"norm", norm, 13, 1e-9, "%.4f"}, {"coefficient", clip_coefficient(norm, 1), 1.0 / 13, 1e-9, " (%.6f)"}}));
  }
  return worst(all).text;
}

void tensor_parallel(Sheet& s, const VerifyCase& small) {
  s.title(
      "Clip norm of a fused MQA projection, Q gradients 3 and 4, K/V rows 12 on both tp ranks: 13 (1/13 at max_norm 1)",
      "DeepSpeed 0.19.8, c_attn marked tensor-parallel, measured");
  VerifyCase c = small;
  for (const Layout& layout : {tp2, dp2_tp2, sp2_tp2}) {
    for (const std::string reduction : reductions) {
      c.options.reduction = reduction;
      s.row(str("ZeRO-0 to 3, fp32 and bf16, ", reduction, ", ", layout.text()), layout,
            reduction == "ordered" ? "17.6918 (0.056523); ZeRO-0 bf16 12.3693" : "",
            [&] { return known_norm(s, layout, c.options); });
    }
  }

  s.title("K/V gradients of c_attn are summed over tp: K/V rows by stage", "DeepSpeed 0.19.8, automatic TP, measured");
  c = small;
  const auto ratio = [&, exact = measure_alone(s.world, c)](const Measured& m) {
    const Part kv = parameter_groups(c.config)[2];
    return Figures{{"ratio", likeness(kv, m.gradient, exact.gradient).ratio, 1, 1e-5, "%.4f "}};
  };
  for (const Layout& layout : {tp2, tp4, dp2_tp2}) {
    const std::string what = "K/V rows, " + layout.text();
    s.row(what, layout, layout.tp == 2 ? "0.5610 and 0.4390; copies drift 2.4e-2 apart" : "", [&] {
      std::string text;
      for (c.options.zero = 0; c.options.zero < 4; ++c.options.zero) text += s.run(what, layout, c, ratio).text;
      return text + "copies equal";
    });
  }

  s.title("8 SGD steps at tp=2 dp=2, max_norm=1.0: largest distance of the losses from one process's",
          "DeepSpeed #9030, with its fault: 4.7e-4");
  c = small;
  c.options.clip_norm = 1;
  c.options.steps = 8;
  c.options.lr = 0.25;
  c.options.given = {"zero"};
  const std::vector<double> right = measure_alone(s.world, c).losses;
  for (int run = 0; run < 8; ++run) {
    c.options.zero = run % 4;
    c.options.reduction = reductions[run % 3];
    c.options.dtype = run < 4 ? "float32" : "bfloat16";
    // bfloat16 is compared with float32: its rounded weights move the losses by some 1e-2, copies left behind by 1.
    const double near = run < 4 ? 1e-5 : 1e-1;
    s.steps(str("ZeRO-", run % 4, " ", c.options.reduction, " ", c.options.dtype), dp2_tp2, c, "",
            [&](const Measured& m) {
              double gap = 0;
              for (std::size_t i = 0; i < right.size(); ++i) gap = std::max(gap, std::abs(right[i] - m.losses[i]));
              return Figures{{"losses", gap, 0, near, "%.0e"},
                             {"first loss", m.losses.front(), right.front(), near, " (%g"},
                             {"last loss", m.losses.back(), right.back(), near, " to %g)"}};
            });
  }
}

void everything_else(Sheet& s, const VerifyCase& full) {
  s.title("Do I divide the loss by sp? Not here. Shard means / sp are right where shards have equally many good tokens",
          "shard means / sp | their sum (DeepSpeed #5248)");
  for (const int n : {3, 2}) {  // good tokens of shard 0, of 4
    VerifyCase c = known_losses(full, 1);
    std::fill_n(c.batch.labels.begin(), n, 2);
    std::fill_n(c.batch.labels.begin() + c.batch.seq_len / 2, 4 - n, 3);
    s.steps(str("shard losses 2 and 6, of ", n, " and ", 4 - n, " good tokens"), sp2, c,
            n == 3 ? "4.0 | 8.0" : "4.0, right | 8.0", loss_is((2.0 * n + 6.0 * (4 - n)) / 4));
  }

  s.title("The rest, over all layouts that fit: the worst", "reported elsewhere");
  const auto variant = [&](const char* name, bool multi_query, bool tied, float dropout, std::vector<const char*> args,
                           const char* theirs = "") {
    args.insert(args.begin(), {"onescale", "verify", "--threads", "1", "--device", full.options.device.c_str(), "--isa",
                               full.options.isa.c_str()});
    const Options options = parse(static_cast<int>(args.size()), args.data()).options;
    VerifyCase c = uneven(small_case(options, s.world.size(), multi_query, tied));
    c.config.embd_pdrop = c.config.resid_pdrop = c.config.attn_pdrop = dropout;
    s.line(name, worst(s.everywhere(str(name, ", "), c, s.exactly(c))).text, theirs);
  };
  variant("multi-head attention, untied head", false, false, 0, {"--zero", "3", "--reduction", "reduce_scatter"});
  variant("dropout 0.1, block recompute", true, true, 0.1f,
          {"--recompute", "block", "--zero", "2", "--reduction", "all_reduce"});
  variant("multi-head, dropout 0.1, light recompute", false, true, 0.1f,
          {"--recompute", "light", "--zero", "1", "--reduction", "ordered"});
  variant("bfloat16, all stages: gradient, and norm within 1e-2", true, true, 0,
          {"--dtype", "bfloat16", "--reduction", "ordered"}, "ZeRO-0 bf16 norm 12.3693 for 13");

  VerifyCase bad = uneven(full);  // no number at the last position, which one sp rank has
  bad.options.given = {"reduction", "zero"};
  bad.options.zero = 0;  // in which ranks that disagree do not wait for each other
  bad.weights = [&full](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    full.weights(i, first, count, out);
    const std::int64_t at = (full.batch.seq_len - 1) * full.config.n_embd;
    if (i == 1 && first <= at && at < first + count) out[at - first] = std::nanf("");  // of wpe
  };
  const auto unmoved = [](const Measured& m) { return skipped(m, StepResult::Outcome::not_finite, "%.0f"); };
  s.line("a gradient that is no number: weights that moved",
         worst(s.everywhere("a gradient that is no number, ", bad, unmoved)).text,
         "applied in bf16 (#8035); norm * 0 = NaN (#7171)");
}

}  // namespace

void fault_tables(Sheet& s, const Options& options) {
  Options plain;
  plain.device = options.device;
  plain.isa = options.isa;
  plain.threads = 1;  // a small model's loops are too short to share
  const VerifyCase full = small_case(plain, s.world.size()), small = uneven(full);
  one_process(s, plain);
  updates(s, small);
  buckets(s, small);
  good_tokens(s, full);
  clipping(s, small);
  tensor_parallel(s, small);
  everything_else(s, full);
}

}  // namespace onescale

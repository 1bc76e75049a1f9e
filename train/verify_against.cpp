// `onescale verify --against FILE`.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "kernels/error.h"
#include "model/parameters.h"
#include "train/layout_check.h"
#include "train/verify.h"

namespace onescale {

namespace {

bool near(double value, double expected, double tolerance) {
  return std::abs(value / expected - 1) <= tolerance;
}

// The nearest whole number above 1 that is the value, or 0.
std::int64_t whole(double value, double tolerance) {
  const double n = std::round(value);
  return n >= 2 && n <= 4096 && near(value, n, tolerance) ? static_cast<std::int64_t>(n) : 0;
}

// Empty for a parameter that the file lacks. Adds to `unpaired` a line for each of those, and for each tensor that is
// no parameter's gradient.
WholeTensors read_theirs(const SafetensorsReader& file, const ParameterTable& table, std::string& unpaired) {
  WholeTensors all;
  std::set<std::string> known = {"loss", "grad_norm", "good_tokens", "logits"};
  for (const Parameter& p : table.parameters) {
    const std::string bare = p.name.starts_with("transformer.") ? p.name.substr(12) : p.name;
    const StoredTensor* found = nullptr;
    for (const std::string& name : {"grad." + p.name, p.name, "grad." + bare, bare})
      if (!found) found = file.find(name);
    std::vector<float>& gradient = all.emplace_back(static_cast<std::size_t>(found ? p.numel() : 0));
    if (!found) {
      unpaired += str("absent: ", p.name, "\n");
      continue;
    }
    known.insert(found->name);
    check(found->shape == p.shape, file.path(*found), ": ", found->describe(), " has not the shape of ", p.name,
          "; gather whole tensors first");
    file.read(*found, 0, p.numel(), gradient.data());
  }
  for (const StoredTensor& t : file.tensors())
    if (!known.contains(t.name)) unpaired += str("no parameter of this model, not compared: ", t.name, "\n");
  return all;
}

// A way to go wrong that no factor describes: the average of the gradients of parts of the batch's tokens.
struct Mistake {
  std::string text;
  std::int64_t parts;
  std::function<bool(std::int64_t part, std::int64_t row, std::int64_t t)> has;
};

// Cuts into k shards of each row's tokens, or into k groups of rows, whose means are averaged or that lose the target
// across their boundary.
std::vector<Mistake> mistakes(std::int64_t rows, std::int64_t T) {
  std::vector<Mistake> all;
  for (const std::int64_t k : {2, 4, 8, 16}) {
    if (T % k == 0)
      all.push_back({str("mean of ", k, " per-shard means, each over its own good tokens: a wrong direction"), k,
                     [=](auto part, auto, auto t) { return t / (T / k) == part; }});
    if (rows % k == 0)
      all.push_back({str("mean of ", k, " micro-batch or replica means, each over its own good tokens"), k,
                     [=](auto part, auto row, auto) { return row / (rows / k) == part; }});
    if (T % k == 0)
      all.push_back({str("labels shifted inside each of ", k, " shards: the targets across their boundaries are lost"),
                     1, [=](auto, auto, auto t) { return (t + 1) % (T / k) != 0 || t + 1 == T; }});
  }
  return all;
}

std::string find_mistake(const VerifyCase& c, Communicator& world, const Part& all, const WholeTensors& theirs,
                         double tolerance) {
  for (const Mistake& mistake : mistakes(c.batch.rows, c.batch.seq_len)) {
    WholeTensors mean;
    for (std::int64_t part = 0; part < mistake.parts; ++part) {
      const auto good = [&](std::int64_t row, std::int64_t t) { return mistake.has(part, row, t); };
      const WholeTensors g = measure_alone(world, masked(c, c.batch.rows, good)).gradient;
      mean.resize(g.size());
      for (std::size_t i = 0; i < g.size(); ++i) {
        mean[i].resize(g[i].size());
        for (std::size_t e = 0; e < g[i].size(); ++e) mean[i][e] += g[i][e] / static_cast<float>(mistake.parts);
      }
    }
    const Likeness l = likeness(all, theirs, mean);
    if (!(l.residual <= tolerance * std::abs(l.ratio))) continue;
    if (near(l.ratio, 1, tolerance)) return mistake.text;
    // With any factor allowed, rounding alone could look like one of these.
    if (whole(l.ratio, tolerance) || whole(1 / l.ratio, tolerance))
      return str(mistake.text, " (and ", l.ratio, " times that)");
  }
  return "";
}

// Why every gradient could be `ratio` times too large; empty where nothing known gives this number.
std::string cause_of_factor(double ratio, const StepResult& ours, double tokens, double tolerance) {
  const auto good = static_cast<double>(ours.good_tokens);
  if (near(ratio, good, tolerance)) return str("a sum over the ", good, " good tokens instead of their mean");
  if (good < tokens && near(ratio, good / tokens, tolerance))
    return str("divided by all ", tokens, " tokens, the ignored ones too, instead of the ", good, " good ones");
  for (const double limit : {1.0, 0.5, 2.0, 5.0, 0.1})
    if (ours.grad_norm > limit && near(ratio * ours.grad_norm, limit, tolerance))
      return str("already clipped to a norm of ", limit);
  if (const std::int64_t k = whole(ratio, tolerance))
    return str(k, " times too large: the degree of sp, tp or dp, or the number of micro-batches, is ", k,
               " and is a factor (sp: ALST's loss with ZeRO-0 to 2)");
  if (const std::int64_t k = whole(1 / ratio, tolerance))
    return str(k, " times too small: divided once too often by a degree of sp, tp or dp, or by micro-batches, of ", k,
               " (sp: ZeRO-3's default reduction with a local loss)");
  if (const std::int64_t k = whole(good / ratio, tolerance))
    return str("a sum over ", good, " good tokens, averaged over ", k, " ranks or micro-batches");
  return "";
}

// Why a norm could be `theirs` over gradients that are right.
std::string cause_of_norm(double theirs, const ModelConfig& config, const WholeTensors& exact, double tolerance) {
  double all = 0, copied = 0;  // squares; of what tp replicates, without the K/V rows
  for (std::size_t i = 0; const Parameter& p : gpt_bigcode_table(config).parameters) {
    const double square = squares(exact[i++]);
    all += square;
    if (p.tp_rule == TpRule::replicated) copied += square;
  }
  const double kv = config.multi_query ? std::pow(likeness(parameter_groups(config)[2], exact, exact).norm, 2) : 0;
  std::vector<std::pair<double, std::string>> known;  // the likelier ones first
  for (const int tp : {2, 4, 8}) {
    known.emplace_back(all + (tp - 1) * kv, str("c_attn's K/V rows are counted on each of ", tp, " tp ranks"));
    known.emplace_back(all + (tp - 1) * (kv + copied), str("all that tp copies is counted on ", tp, " tp ranks"));
  }
  known.emplace_back(all - kv, "c_attn's K/V rows are not counted");
  if (config.tie_word_embeddings) known.emplace_back(all + squares(exact[0]), "the tied embedding is counted twice");
  for (const double k : {2.0, 4.0, 8.0, 16.0}) {
    for (const double factor : {k, k * k}) known.emplace_back(all * factor, str("counted ", k, " times"));
    for (const double factor : {k, k * k}) known.emplace_back(all / factor, str("one part or a mean of ", k));
  }
  for (const auto& [squares, cause] : known)
    if (near(theirs, std::sqrt(squares), tolerance)) return cause;
  return "no known cause";
}

// Prints the comparison, on rank 0; returns the exit code.
int report(const VerifyCase& c, Communicator& world, const Measured& ours, const WholeTensors& theirs,
           const SafetensorsReader& file) {
  const bool rounded = std::ranges::any_of(file.tensors(), [](auto& t) { return t.type == FileType::BF16; });
  // Another library's order of additions, or TF32 products; a number stored in bfloat16 has 8 bits, and what is
  // computed in it fewer; reduce_dtype rounds every sum of several ranks.
  const bool wire = c.options.reduce_dtype == "bfloat16";
  const double tolerance = c.options.dtype == "bfloat16" ? 3e-2 : wire ? 1e-2 : rounded ? 4e-3 : 1e-3;
  const auto absent = [&](const Part::Range& range) { return theirs[range.parameter].empty(); };
  Part all{"everything", {}};
  const std::string both_zero = "both are 0, as a plain float64 forward says";
  bool turned = false, others_agree = true;  // turned: a group other than the K/V rows has another direction
  std::vector<Part> groups = parameter_groups(c.config);
  for (Part& group : groups) {
    std::erase_if(group.ranges, absent);
    all.ranges.insert(all.ranges.end(), group.ranges.begin(), group.ranges.end());
    if (group.name == "c_attn K/V rows") continue;
    const Likeness l = likeness(group, theirs, ours.gradient);
    turned |= !(l.residual <= tolerance * std::max(1.0, std::abs(l.ratio)));
    others_agree &= near(l.ratio, 1, tolerance) || (l.norm == 0 && l.residual == 0);
  }
  const std::string mistake = turned ? find_mistake(c, world, all, theirs, tolerance) : "";
  std::printf("good tokens %lld, loss %.9f, norm %.9f\n%-20s %12s %12s  %s\n",
              static_cast<long long>(ours.result.good_tokens), ours.result.loss, ours.result.grad_norm, "", "ratio",
              "residual", "likeliest cause");
  bool agree = std::ranges::none_of(theirs, [](const std::vector<float>& g) { return g.empty(); });
  for (const Part& group : groups) {
    if (group.ranges.empty()) continue;
    const Likeness l = likeness(group, theirs, ours.gradient);
    std::string cause;
    if (near(l.ratio, 1, tolerance) && l.residual <= tolerance)
      cause = "agrees";
    else if (l.norm == 0 && l.residual == 0 && plain_is_flat(c, group))
      cause = both_zero;
    else if (group.name == "c_attn K/V rows" && !turned && others_agree)
      cause = l.ratio < 1
                  ? str("not summed over tp: one rank's part (about 1 / tp = 1 / ", std::round(1 / l.ratio), ")")
                  : "summed over tp more than once";
    else if (!mistake.empty())
      cause = mistake;
    else if (l.residual <= tolerance * std::abs(l.ratio))
      cause = cause_of_factor(l.ratio, ours.result, static_cast<double>(c.batch.ids.size()), tolerance);
    if (cause.empty())
      cause = std::isnan(l.residual)                 ? "holds what is no number"
              : l.residual > 0.1 * std::abs(l.ratio) ? "another direction: other weights, tokens or dropout?"
                                                     : "no known cause";
    agree &= cause == "agrees" || cause == both_zero;
    std::printf("%-20s %12.6f %12.2e  %s\n", group.name.c_str(), l.ratio, l.residual, cause.c_str());
  }
  for (const std::string name : {"grad_norm", "loss"}) {
    const StoredTensor* const stored = file.find(name);
    if (!stored || stored->numel() != 1) continue;
    double other = 0;
    file.read(*stored, 0, 1, &other);
    const double value = name == "loss" ? ours.result.loss : ours.result.grad_norm, ratio = other / value;
    std::string cause = "agrees";
    if (other != value && !near(ratio, 1, tolerance))
      cause = name == "loss" ? "not the mean over the good tokens"
              : near(ratio, likeness(all, theirs, ours.gradient).ratio, tolerance)
                  ? "the gradients' own factor"
                  : cause_of_norm(other, c.config, ours.gradient, tolerance);
    agree &= cause == "agrees";
    std::printf("%-20s %12.6f %12s  %s\n", name.c_str(), ratio, "", cause.c_str());
  }
  std::printf(agree ? "they agree\n" : "they do not agree\n");
  return agree ? 0 : 1;
}

}  // namespace

int verify_against(const Options& options, Communicator& world) {
  check_usage(!options.model.empty() && !options.batch.empty(), "against ", options.against,
              " needs --model and --batch: what those gradients are of");
  const Layout layout = layout_of(options, world);
  const ModelSource source(options.model);
  const VerifyCase c = model_case(options, source, read_batch(options.batch, source.config()));
  check_layout(c.config, c.batch.seq_len, layout, options.sp_mode);
  check_batch(c.batch.rows, 1, layout);
  const SafetensorsReader file(options.against);
  std::string unpaired;
  const WholeTensors theirs = read_theirs(file, source.table(), unpaired);
  check(!std::ranges::all_of(theirs, &std::vector<float>::empty), options.against,
        " holds no gradient by a Hugging Face name, such as ", source.table().parameters[0].name,
        "; save them as NAME or grad.NAME");
  const Measured ours = measure(world, layout, c);
  if (world.rank() == 0)
    std::printf("%s%s against %s, %s: ", unpaired.c_str(), options.against.c_str(), layout.text().c_str(),
                options.dtype.c_str());
  return world.exchange(world.rank() == 0 ? report(c, world, ours, theirs, file) : 0)[0];
}

}  // namespace onescale

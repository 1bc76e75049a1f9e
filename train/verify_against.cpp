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

// Names of parameters that the file lacks, and of its tensors that are no parameter's gradient.
struct Unpaired {
  std::vector<std::string> absent, extra;
};

WholeTensors read_theirs(const SafetensorsReader& file, const ParameterTable& table, Unpaired& unpaired) {
  WholeTensors all;
  std::set<std::string> known = {"loss", "grad_norm", "good_tokens", "logits"};
  for (const Parameter& p : table.parameters) {
    const std::string bare = p.name.starts_with("transformer.") ? p.name.substr(12) : p.name;
    const StoredTensor* found = nullptr;
    for (const std::string& name : {"grad." + p.name, p.name, "grad." + bare, bare})
      if (!found) found = file.find(name);
    all.emplace_back(static_cast<std::size_t>(p.numel()));
    if (!found) {
      unpaired.absent.push_back(p.name);
      continue;
    }
    known.insert(found->name);
    check(found->shape == p.shape, file.path(*found), ": ", found->describe(), " has not the shape of ", p.name,
          "; gather whole tensors first");
    file.read(*found, 0, p.numel(), all.back().data());
  }
  for (const StoredTensor& t : file.tensors())
    if (!known.contains(t.name)) unpaired.extra.push_back(t.name);
  return all;
}

// A way to go wrong that no factor describes, with the gradient that it gives.
struct Mistake {
  std::string text;
  std::vector<std::vector<std::int32_t>> labels;  // their gradients are averaged
};

// Cuts of the batch into k shards of each row's tokens, or into k groups of rows, whose means are averaged or that lose
// the target across their boundary.
std::vector<Mistake> mistakes(const HostBatch& batch) {
  std::vector<Mistake> all;
  const std::int64_t T = batch.seq_len;
  for (const std::int64_t k : {2, 4, 8, 16}) {
    for (const bool rows : {false, true}) {
      if ((rows ? batch.rows : T) % k != 0) continue;
      Mistake means{str("mean of ", k,
                        rows ? " micro-batch or replica means, each over its own good tokens"
                             : " per-shard means, each over its own good tokens: a wrong direction"),
                    std::vector(static_cast<std::size_t>(k), batch.labels)};
      for (std::int64_t i = 0; i < batch.rows * T; ++i) {
        const std::int64_t own = rows ? i / T / (batch.rows / k) : i % T / (T / k);
        for (std::int64_t part = 0; part < k; ++part)
          if (part != own) means.labels[static_cast<std::size_t>(part)][static_cast<std::size_t>(i)] = -100;
      }
      all.push_back(std::move(means));
    }
    if (T % k != 0) continue;
    Mistake shift{str("labels shifted inside each of ", k, " shards: the targets across their boundaries are lost"),
                  {batch.labels}};
    for (std::int64_t i = 0; i < batch.rows * T; ++i)
      if (i % (T / k) == T / k - 1 && i % T != T - 1) shift.labels[0][static_cast<std::size_t>(i)] = -100;
    all.push_back(std::move(shift));
  }
  return all;
}

std::string find_mistake(const Options& options, const VerifyCase& c, const StepSettings& settings, const Part& all,
                         const WholeTensors& theirs, double tolerance) {
  for (const Mistake& mistake : mistakes(c.batch)) {
    WholeTensors mean;
    for (const std::vector<std::int32_t>& labels : mistake.labels) {
      VerifyCase part = c;
      part.batch.labels = labels;
      const WholeTensors g = measure_alone(options, part, settings).gradient;
      if (mean.empty()) mean = WholeTensors(g.size());
      for (std::size_t i = 0; i < g.size(); ++i) {
        mean[i].resize(g[i].size());
        for (std::size_t e = 0; e < g[i].size(); ++e) mean[i][e] += g[i][e] / static_cast<float>(mistake.labels.size());
      }
    }
    const Likeness l = likeness(all, theirs, mean);
    // With any factor allowed, rounding alone could look like one of these.
    const bool alone = near(l.ratio, 1, tolerance);
    const bool times = whole(l.ratio, tolerance) > 0 || whole(1 / l.ratio, tolerance) > 0;
    if (l.residual <= tolerance * std::abs(l.ratio) && (alone || times))
      return mistake.text + (alone ? "" : str(" (and ", l.ratio, " times that)"));
  }
  return "";
}

// Why every gradient could be `ratio` times too large; empty where nothing known gives this number.
std::string cause_of_factor(double ratio, const HostBatch& batch, double norm, double tolerance) {
  const auto good = static_cast<double>(count_good_tokens(batch.labels.data(), batch.rows * batch.seq_len));
  const auto tokens = static_cast<double>(batch.rows * batch.seq_len);
  if (near(ratio, good, tolerance)) return str("a sum over the ", good, " good tokens instead of their mean");
  if (good < tokens && near(ratio, good / tokens, tolerance))
    return str("divided by all ", tokens, " tokens, the ignored ones too, instead of the ", good, " good ones");
  for (const double limit : {1.0, 0.5, 2.0, 5.0, 0.1})
    if (norm > limit && near(ratio * norm, limit, tolerance)) return str("already clipped to a norm of ", limit);
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
  const ParameterTable table = gpt_bigcode_table(config);
  double all = 0, replicated = 0;
  for (const Part& part : each_parameter(table)) {
    const double n = likeness(part, exact, exact).norm;
    all += n * n;
    if (table.parameters[part.ranges[0].parameter].tp_rule == TpRule::replicated) replicated += n * n;
  }
  const double kv = config.multi_query ? std::pow(likeness(parameter_groups(config)[2], exact, exact).norm, 2) : 0;
  const double wte = std::pow(likeness(each_parameter(table)[0], exact, exact).norm, 2);
  std::vector<std::pair<double, std::string>> known;  // squares, the likelier ones first
  for (const int tp : {2, 4, 8}) {
    known.emplace_back(all + (tp - 1) * kv, str("c_attn's K/V rows are counted on each of ", tp, " tp ranks"));
    known.emplace_back(all + (tp - 1) * (kv + replicated), str("all that tp copies is counted on ", tp, " tp ranks"));
  }
  known.emplace_back(all - kv, "c_attn's K/V rows are not counted");
  if (config.tie_word_embeddings) known.emplace_back(all + wte, "the tied embedding is counted twice");
  for (const double k : {2.0, 4.0, 8.0, 16.0}) {
    for (const double squares : {all * k, all * k * k}) known.emplace_back(squares, str("counted ", k, " times"));
    for (const double squares : {all / k, all / k / k}) known.emplace_back(squares, str("one part or a mean of ", k));
  }
  for (const auto& [squares, cause] : known)
    if (near(theirs, std::sqrt(squares), tolerance)) return cause;
  return "no known cause";
}

// Prints the comparison, on rank 0; returns the exit code.
int report(const Options& options, const VerifyCase& c, const Layout& layout, const Measured& ours,
           const WholeTensors& theirs, const SafetensorsReader& file, const Unpaired& unpaired) {
  const std::vector<std::string>& absent = unpaired.absent;
  const StepSettings settings = verify_settings(options, c);
  const ParameterTable table = gpt_bigcode_table(c.config);
  int code = absent.empty() ? 0 : 1;
  const bool rounded = std::any_of(file.tensors().begin(), file.tensors().end(),
                                   [](const StoredTensor& t) { return t.type == FileType::BF16; });
  // Another library's order of additions, or TF32 products; a number stored in bfloat16 has 8 bits, and what is
  // computed in it fewer.
  const double tolerance = settings.zero.dtype == DType::bfloat16 ? 3e-2 : rounded ? 4e-3 : 1e-3;
  const double norm = ours.result.grad_norm;
  Part all{"everything", {}};
  std::vector<Part> groups = parameter_groups(c.config);
  for (const std::string& name : absent) std::printf("absent: %s\n", name.c_str());
  for (const std::string& name : unpaired.extra)
    std::printf("no parameter of this model, not compared: %s\n", name.c_str());
  for (Part& group : groups) {
    std::erase_if(group.ranges, [&](const Part::Range& range) {
      const std::string& name = table.parameters[range.parameter].name;
      return std::find(absent.begin(), absent.end(), name) != absent.end();
    });
    all.ranges.insert(all.ranges.end(), group.ranges.begin(), group.ranges.end());
  }
  std::erase_if(groups, [](const Part& group) { return group.ranges.empty(); });

  const Likeness total = likeness(all, theirs, ours.gradient);
  std::vector<Likeness> found;
  bool turned = false, others_agree = true;  // turned: a group other than the K/V rows has another direction
  for (const Part& group : groups) {
    found.push_back(likeness(group, theirs, ours.gradient));
    if (group.name == "c_attn K/V rows") continue;
    turned |= !(found.back().residual <= tolerance * std::max(1.0, std::abs(found.back().ratio)));
    others_agree &= near(found.back().ratio, 1, tolerance);
  }
  const std::string mistake = turned ? find_mistake(options, c, settings, all, theirs, tolerance) : std::string();
  std::printf("%s against %s, %s: good tokens %lld, loss %.9f, norm %.9f\n%-20s %12s %12s  %s\n",
              options.against.c_str(), layout.text().c_str(), options.dtype.c_str(),
              static_cast<long long>(ours.result.good_tokens), ours.result.loss, norm, "", "ratio", "residual",
              "likeliest cause");
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const Likeness& l = found[i];
    std::string cause;
    if (near(l.ratio, 1, tolerance) && l.residual <= tolerance) {
      cause = "agrees";
    } else if (groups[i].name == "c_attn K/V rows" && !turned && others_agree) {
      cause = l.ratio < 1
                  ? str("not summed over tp: one rank's part (about 1 / tp = 1 / ", std::round(1 / l.ratio), ")")
                  : "summed over tp more than once";
    } else if (!mistake.empty()) {
      cause = mistake;
    } else if (l.residual <= tolerance * std::abs(l.ratio)) {
      cause = cause_of_factor(l.ratio, c.batch, norm, tolerance);
    }
    if (cause.empty() && std::isnan(l.residual)) cause = "holds what is no number";
    if (cause.empty())
      cause = l.residual > 0.1 * std::abs(l.ratio) ? "another direction: other weights, tokens or dropout?"
                                                   : "no known cause";
    if (cause != "agrees") code = 1;
    std::printf("%-20s %12.6f %12.2e  %s\n", groups[i].name.c_str(), l.ratio, l.residual, cause.c_str());
  }
  for (const auto& [name, value] : {std::pair{"grad_norm", norm}, std::pair{"loss", ours.result.loss}}) {
    const StoredTensor* const stored = file.find(name);
    if (!stored || stored->numel() != 1) continue;
    double other = 0;
    file.read(*stored, 0, 1, &other);
    const double ratio = other / value;
    std::string cause = "agrees";
    if (other != value && !near(ratio, 1, tolerance)) {
      cause = name == std::string("loss")           ? "not the mean over the good tokens"
              : near(ratio, total.ratio, tolerance) ? "the gradients' own factor"
                                                    : cause_of_norm(other, c.config, ours.gradient, tolerance);
      code = 1;
    }
    std::printf("%-20s %12.6f %12s  %s\n", name, ratio, "", cause.c_str());
  }
  std::printf(code ? "they do not agree\n" : "they agree\n");
  return code;
}

}  // namespace

int verify_against(const Options& options, Communicator& world) {
  check_usage(!options.model.empty() && !options.batch.empty(), "against ", options.against,
              " needs --model and --batch: what those gradients are of");
  const Layout layout =
      make_layout(world.size(), world.rank(), static_cast<int>(options.sp), static_cast<int>(options.tp));
  const ModelSource source(options.model);
  VerifyCase c{source.config(), source.fetch(), read_batch(options.batch, source.config())};
  c.config.embd_pdrop = c.config.resid_pdrop = c.config.attn_pdrop = 0;
  check_layout(c.config, c.batch.seq_len, layout, options.sp_mode);
  check_batch(c.batch.rows, 1, layout);
  const SafetensorsReader file(options.against);
  Unpaired unpaired;
  const WholeTensors theirs = read_theirs(file, source.table(), unpaired);
  check(unpaired.absent.size() < theirs.size(), options.against, " holds no gradient by a Hugging Face name, such as ",
        source.table().parameters[0].name, "; save them as NAME or grad.NAME");
  const Measured ours = measure(options, world, layout, c, verify_settings(options, c));

  const int code = world.rank() == 0 ? report(options, c, layout, ours, theirs, file, unpaired) : 0;
  return world.exchange(code)[0];
}

}  // namespace onescale

#include "train/verify_sheet.h"

#include <limits>

#include "model/parameters.h"
#include "train/layout_check.h"

namespace onescale {

namespace {

std::string text_of(const Layout& layout, const Options& options) {
  return layout.text() + (layout.sp == 1 ? "" : " " + options.sp_mode);
}

}  // namespace

Judge Sheet::exactly(VerifyCase c, double right) const {
  c = gradient_of(c);
  c.options.recompute = "none";
  const Measured exact = measure_alone(world, c);
  std::vector<Part> tensors;
  std::vector<bool> flat;  // whose exact gradient is 0
  for (std::size_t i = 0; i < exact.gradient.size(); ++i) {
    tensors.push_back({gpt_bigcode_table(c.config).parameters[i].name, {{i, 0, std::ssize(exact.gradient[i])}}});
    flat.push_back(squares(exact.gradient[i]) == 0 && plain_is_flat(c, tensors[i]));
  }
  return [=](const Measured& m) {
    double weights = 1, vectors = 1, error = 0;  // the worst ones
    std::string worst;
    const ParameterTable table = gpt_bigcode_table(c.config);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Likeness l = likeness(tensors[i], m.gradient, exact.gradient);
      double& ratio = table.parameters[i].shape.size() == 1 ? vectors : weights;
      if (!flat[i] && worse(std::abs(l.ratio / right - 1), std::abs(ratio - 1))) ratio = l.ratio / right;
      const double own = flat[i] ? l.residual : std::hypot(l.residual, l.ratio - right) / right;
      if (worse(own, error)) error = own, worst = tensors[i].name;
    }
    // In float32 only the order of additions differs. bfloat16 keeps 8 bits and layouts round at other places: a ratio
    // averages that, over 20 elements in the smallest vectors, the error of a tensor does not.
    // reduce_dtype bfloat16 rounds what each rank adds, or each sum of some, by up to 2^-8.
    const bool rounds = c.options.dtype == "bfloat16", wire = c.options.reduce_dtype == "bfloat16";
    const double near = rounds ? 2e-2 : wire ? 1e-2 : 1e-5, loss = rounds ? 1e-2 : 1e-5;
    const StepResult &ours = m.result, &ref = exact.result;
    return Figures{{"weights", weights * right, right, near, "%.4f"},
                   {"vectors", vectors * right, right, near, " / %.4f"},
                   {"error of " + worst, error, 0,
                    rounds ? 5e-2
                    : wire ? 2e-2
                           : 1e-5,
                    "  %.0e"},
                   {"good tokens too few", static_cast<double>(ref.good_tokens - ours.good_tokens), 0, 0},
                   {"loss", ours.loss, ref.loss, loss * ref.loss},
                   {"norm", ours.grad_norm, ref.grad_norm, (wire ? 1e-2 : loss) * ref.grad_norm}};
  };
}

Cell Sheet::run(const std::string& what, const Layout& layout, const VerifyCase& c, const Judge& judge) {
  const Options& o = c.options;
  const std::string path = str("ZeRO-", o.zero, " ", o.reduction);
  const Measured m = measure(world, layout, c);
  if (!root()) return {};
  Figures all = judge(m);
  if (!m.replicas.empty()) all.push_back({"copies that differ: " + m.replicas, 1, 0, 0});
  Cell cell = figures(str(what, ", ", path), all);
  cell.layout = text_of(layout, o);
  cell.path = path;
  cell.sp = layout.sp;
  return cell;
}

void Sheet::steps(const std::string& what, const Layout& layout, VerifyCase c, const std::string& theirs,
                  const Judge& judge) {
  row(what, layout, theirs, [&] {
    if (c.options.has("zero")) return run(what, layout, c, judge).text;
    std::vector<Cell> all;
    for (c.options.zero = 0; c.options.zero < (layout.shards() > 1 ? 4 : 1); ++c.options.zero)
      all.push_back(run(what, layout, c, judge));
    return worst(all).text;
  });
}

std::vector<Cell> Sheet::everywhere(const std::string& what, VerifyCase c, const Judge& judge) {
  const Options asked = c.options;
  Options& o = c.options;
  const auto other = [&](const char* option, bool same) { return asked.has(option) && !same; };
  std::vector<Cell> all;
  for (int ranks = 1; ranks <= world.size(); ++ranks) {
    for (int cut = 0; cut < 2 * ranks * ranks; ++cut) {  // every tp, sp and sp_mode
      const int tp = cut / 2 / ranks + 1, sp = cut / 2 % ranks + 1;
      o.sp_mode = cut % 2 == 0 ? "ulysses" : "gather_kv";
      if (world.size() % ranks != 0 || ranks % (sp * tp) != 0 || other("sp", sp == asked.sp) ||
          other("tp", tp == asked.tp) || (sp == 1 ? cut % 2 == 1 : other("sp_mode", o.sp_mode == asked.sp_mode)))
        continue;
      const Layout layout{ranks / (sp * tp), sp, tp, 0};
      const std::string text = text_of(layout, o);
      try {
        check_layout(c.config, c.batch.seq_len, layout, o.sp_mode);
        check_batch(c.batch.rows, 1, layout);
      } catch (const UsageError& e) {
        line(text, "does not fit:", e.what());
        continue;
      }
      for (int path = 0; path < 12; ++path) {
        o.zero = path / 3;
        o.reduction = reductions[path % 3];
        if (other("zero", o.zero == asked.zero) || other("reduction", o.reduction == asked.reduction)) continue;
        all.push_back(run(what + text, layout, c, judge));
        if (layout.shards() == 1) break;  // nothing is reduced: all stages and reductions are one
      }
    }
  }
  return all;
}

Cell Sheet::figures(const std::string& what, const Figures& all) {
  Cell cell;
  for (const auto& [name, value, right, tolerance, format] : all) {
    const double distance = std::abs(value - right);
    const bool off = !(distance <= tolerance);  // also where it is no number
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    cell.text += str(text, off ? "(!)" : "");
    cell.bad = std::max(cell.bad, off ? std::numeric_limits<double>::infinity() : distance);
    if (off) off_.push_back(str(table_, ". ", what, ", ", name, ": ", value, " where ", right, " is right"));
  }
  return cell;
}

int Sheet::finish() const {
  const int off = world.exchange(static_cast<int>(off_.size()))[0];
  if (!root()) return off;
  if (lacking_) std::printf("\n%d rows need more ranks: mpirun -n 4 onescale verify\n", lacking_);
  std::printf(off ? "\n%d figures are off:\n" : "\nall figures are right\n", off);
  for (std::size_t i = 0; i < std::min<std::size_t>(off_.size(), 50); ++i) std::printf("   %s\n", off_[i].c_str());
  return off;
}

}  // namespace onescale

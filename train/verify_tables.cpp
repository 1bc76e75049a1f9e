// The tables of `onescale verify`.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>

#include "kernels/error.h"
#include "model/parameters.h"
#include "train/layout_check.h"
#include "train/verify.h"

namespace onescale {

namespace {

constexpr Reduction reductions[] = {Reduction::ordered, Reduction::reduce_scatter, Reduction::all_reduce};
constexpr const char* reduction_names[] = {"ordered", "reduce_scatter", "all_reduce"};
constexpr Layout one{1, 1, 1, 0}, dp2{2, 1, 1, 0}, sp2{1, 2, 1, 0}, sp4{1, 4, 1, 0}, tp2{1, 1, 2, 0}, tp4{1, 1, 4, 0},
    dp2_tp2{2, 1, 2, 0}, sp2_tp2{1, 2, 2, 0};

std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

// What a row shows of several figures: the worst. Infinitely bad is one that is off.
struct Cell {
  std::string text;
  double bad = -1;
  void keep_worse(const Cell& other) {
    if (other.bad > bad) *this = other;
  }
};

// The case with its first `rows` rows, labelled with the next tokens where `good` says so, else ignored.
template <class Good>
VerifyCase relabelled(VerifyCase c, std::int64_t rows, const Good& good) {
  const std::int64_t T = c.batch.seq_len;
  c.batch.rows = rows;
  for (std::int64_t i = 0; i < rows * T; ++i) {
    const auto at = static_cast<std::size_t>(i);
    c.batch.labels[at] = !good(i / T, i % T) ? -100 : (i + 1) % T ? c.batch.ids[at + 1] : 5;
  }
  return c;
}

double moved(const Measured& m) {  // elements that the step changed
  double n = 0;
  for (const auto& g : m.gradient)
    n += static_cast<double>(std::count_if(g.begin(), g.end(), [](float x) { return std::abs(x) > 0; }));
  return n;
}

class Tables {
 public:
  Tables(const Options& options, Communicator& world, const VerifyCase& user)
      : options_(options), plain_(options), world_(world), user_(user), small_(small_case(world.size())) {
    plain_.dtype = "float32", plain_.recompute = "none", plain_.sp_mode = "ulysses", plain_.reduction = "ordered";
    plain_.bucket_mb = 32, plain_.zero = 1;
    plain_.threads = 1;  // a small model's loops are too short to share
    if (options.model.empty() && !options.has("threads")) options_.threads = 1;
  }

  void gradients();
  void absolute();
  void small_buckets();
  void good_tokens();
  void accumulation();
  void clipping();
  void tensor_parallel();
  void dividing_by_sp();
  void everything_else();
  int finish();

 private:
  struct Shape {
    Layout layout;
    SpMode mode;
    std::string text() const {
      return layout.text() + (layout.sp == 1 ? "" : mode == SpMode::ulysses ? " ulysses" : " gather_kv");
    }
  };
  std::vector<Shape> shapes(const VerifyCase& c, bool only_given);

  bool root() const { return world_.rank() == 0; }
  Communicator* group(int size);  // the first ranks; nullptr on the others
  Measured step(Layout layout, const VerifyCase& c, const StepSettings& s, int steps = 1, double lr = verify_lr);
  Measured alone(const VerifyCase& c, const StepSettings& s, int steps = 1, double lr = verify_lr) {
    return root() ? measure_alone(&c == &user_ ? options_ : plain_, c, s, steps, lr) : Measured{};
  }

  void title(const std::string& what, const char* theirs);
  void row(const std::string& what, const std::string& ours, const std::string& theirs = "") {
    if (root()) std::printf("   %-58s %-40s %s\n", what.c_str(), ours.c_str(), theirs.c_str());
  }
  // For a row that needs a layout of more ranks than there are: says so.
  bool lacks(const std::string& what, const Layout& layout, const std::string& theirs);
  // Off where it is farther than `tolerance` from `right`.
  Cell figure(const std::string& what, double value, double right, double tolerance, const char* format = "%.4f");
  // Ratio of the matrix and of the vector that are worst, and the largest error, of a step whose gradient should be
  // right * exact; loss, N, norm and replicas are checked with it.
  Cell judged(const std::string& what, const VerifyCase& c, const Measured& m, const Measured& exact, double right = 1,
              DType dtype = DType::float32);
  // A row of that, the worst of all stages.
  void stages(const std::string& what, const Layout& layout, const VerifyCase& c, const StepSettings& s,
              const std::string& theirs = "", double right = 1);
  Cell known_norm(Layout layout, int kind);

  Options options_, plain_;  // as given; and with the defaults of a verification
  Communicator& world_;
  const VerifyCase& user_;
  VerifyCase small_;
  std::map<int, std::unique_ptr<Communicator>> groups_;
  std::vector<std::string> off_;
  int lacking_ = 0, table_ = 0;
};

Communicator* Tables::group(int size) {
  if (world_.rank() >= size) return nullptr;
  auto& kept = groups_[size];
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  if (!kept) kept = size == 1 ? make_single_communicator("world") : world_.split(members, "world");
  return kept.get();
}

Measured Tables::step(Layout layout, const VerifyCase& c, const StepSettings& s, int steps, double lr) {
  Communicator* const ranks = group(layout.world());
  if (!ranks) return {};
  layout.rank = ranks->rank();
  return measure(&c == &user_ ? options_ : plain_, *ranks, layout, c, s, steps, lr);
}

void Tables::title(const std::string& what, const char* theirs) {
  ++table_;
  if (root()) std::printf("\n%d. %s\n   %-58s %-40s %s\n", table_, what.c_str(), "", "onescale, measured now", theirs);
}

bool Tables::lacks(const std::string& what, const Layout& layout, const std::string& theirs) {
  if (layout.world() <= world_.size()) return false;
  ++lacking_;
  row(what, str("needs ", layout.world(), " ranks"), theirs);
  return true;
}

Cell Tables::figure(const std::string& what, double value, double right, double tolerance, const char* format) {
  if (!root()) return {};
  const double distance = std::abs(value - right);
  if (distance <= tolerance) return {number(format, value), distance};  // not so where it is no number
  off_.push_back(str(table_, ". ", what, ": ", number("%.6g", value), " where ", number("%.6g", right), " is right"));
  return {number(format, value) + "(!)", std::numeric_limits<double>::infinity()};
}

Cell Tables::judged(const std::string& what, const VerifyCase& c, const Measured& m, const Measured& exact,
                    double right, DType dtype) {
  if (!root()) return {};
  const ParameterTable table = gpt_bigcode_table(c.config);
  double worst[2] = {1, 1}, error = 0;  // of matrices, of vectors
  std::string parameter;
  for (const Part& part : each_parameter(table)) {
    const Likeness l = likeness(part, m.gradient, exact.gradient, right);
    double& ratio = worst[table.parameters[part.ranges[0].parameter].shape.size() == 1];
    // Written so that what is no number is worst.
    if (!(std::abs(l.ratio / right - 1) <= std::abs(ratio - 1))) ratio = l.ratio / right;
    if (!(l.error <= error)) error = l.error, parameter = part.name;
  }
  // In float32 only the order of additions differs. bfloat16 keeps 8 bits and layouts round at other places: a ratio
  // averages that, over 20 elements in the smallest vectors, the error of a tensor does not.
  const bool rounds = dtype == DType::bfloat16;
  const double near = rounds ? 2e-2 : 1e-5;
  Cell cell = figure(what + ", weights", worst[0] * right, right, near);
  const Cell vectors = figure(what + ", vectors", worst[1] * right, right, near);
  const Cell whole = figure(str(what, ", error of ", parameter), error, 0, rounds ? 5e-2 : 1e-5, "%.0e");
  cell = {cell.text + " / " + vectors.text + "  " + whole.text, std::max({whole.bad, cell.bad, vectors.bad})};
  const auto same = [&](const char* name, double value, double ref, double tolerance) {
    cell.bad = std::max(cell.bad, figure(what + name, value, ref, tolerance * ref).bad);
  };
  same(", good tokens", static_cast<double>(m.result.good_tokens), static_cast<double>(exact.result.good_tokens), 0);
  same(", loss", m.result.loss, exact.result.loss, rounds ? 1e-2 : 1e-5);
  same(", norm", m.result.grad_norm, exact.result.grad_norm, rounds ? 1e-2 : 1e-5);
  if (!m.replicas.empty()) off_.push_back(str(table_, ". ", what, ": ", m.replicas));
  return cell;
}

void Tables::stages(const std::string& what, const Layout& layout, const VerifyCase& c, const StepSettings& s,
                    const std::string& theirs, double right) {
  const std::string name = what + ", " + layout.text();
  if (lacks(name, layout, theirs)) return;
  const Measured exact = alone(c, verify_settings(plain_, c));
  Cell worst;
  for (int stage = 0; stage < (layout.shards() > 1 ? 4 : 1); ++stage) {
    StepSettings settings = s;
    settings.zero.stage = stage;
    worst.keep_worse(judged(str(name, ", ZeRO-", stage), c, step(layout, c, settings), exact, right));
  }
  row(name, worst.text, theirs);
}

std::vector<Tables::Shape> Tables::shapes(const VerifyCase& c, bool only_given) {
  const auto refused = [&](const char* name, bool given) { return only_given && options_.has(name) && !given; };
  std::vector<Shape> all;
  for (int world = 1; world <= world_.size(); ++world) {
    for (int cut = 1; cut <= world * world; ++cut) {  // every pair of tp and sp
      const int tp = (cut - 1) / world + 1, sp = (cut - 1) % world + 1;
      if (world_.size() % world != 0 || world % (sp * tp) != 0) continue;
      for (const std::string mode : {"ulysses", "gather_kv"}) {
        if ((sp == 1 && mode == "gather_kv") || refused("sp", options_.sp == sp) || refused("tp", options_.tp == tp) ||
            (sp > 1 && refused("sp_mode", options_.sp_mode == mode)))
          continue;
        const Shape shape{{world / (sp * tp), sp, tp, 0}, mode == "ulysses" ? SpMode::ulysses : SpMode::gather_kv};
        try {
          check_layout(c.config, c.batch.seq_len, shape.layout, mode);
          check_batch(c.batch.rows, 1, shape.layout);
          all.push_back(shape);
        } catch (const UsageError& e) {
          row(shape.text(), "does not fit:", e.what());
        }
      }
    }
  }
  return all;
}

void Tables::gradients() {
  title("Gradient over the exact gradient, from the weight change of one SGD step: sp times too large, or 1/sp?",
        "DeepSpeed 0.19.8, measured: sp=2, 4 with ALST's loss | with a local loss");
  const StepSettings settings = verify_settings(options_, user_);
  const Measured exact = alone(user_, settings);
  std::map<std::pair<int, int>, std::map<int, Cell>> paths;  // by stage and reduction, then by sp
  std::vector<std::pair<std::string, Cell>> layouts;
  const std::vector<Shape> fitting = shapes(user_, true);
  check_usage(!fitting.empty(), "no layout of ", world_.size(), " ranks fits the model and the options; give others");
  for (const Shape& shape : fitting) {
    layouts.emplace_back(shape.text(), Cell{});
    bool ran = false;
    for (int path = 0; path < 12; ++path) {
      const int stage = path / 3, kind = path % 3;
      if ((options_.has("zero") && options_.zero != stage) ||
          (options_.has("reduction") && options_.reduction != reduction_names[kind]))
        continue;
      if (shape.layout.shards() == 1 && ran) continue;  // nothing is reduced: all paths are one
      ran = true;
      StepSettings s = settings;
      s.sp_mode = shape.mode;
      s.zero.stage = stage;
      s.zero.reduction.kind = reductions[kind];
      const Measured m = step(shape.layout, user_, s);
      Cell cell = judged(str(shape.text(), ", ZeRO-", stage, " ", reduction_names[kind]), user_, m, exact, 1,
                         settings.zero.dtype);
      cell.text += number("  norm %.7f", m.result.grad_norm / exact.result.grad_norm);
      paths[{stage, kind}][shape.layout.sp].keep_worse(cell);
      layouts.back().second.keep_worse(cell);
    }
  }
  for (const auto& [path, by_sp] : paths) {
    const auto [stage, kind] = path;
    std::string ours;
    for (const auto& [sp, cell] : by_sp) ours += str("sp=", sp, " ", cell.text.substr(0, cell.text.find(" / ")), "  ");
    row(str("ZeRO-", stage, " ", reduction_names[kind]), ours,
        stage < 3   ? "2, 4 | 1, 1"
        : kind == 2 ? "2, 4 | 1, 1       (reduce_scatter off, contiguous_gradients on)"
                    : "1, 1 | 0.5, 0.25  (default)");
  }
  row("By layout, the worst of these paths:", "matrices / vectors  error  norm over exact");
  for (const auto& [layout, worst] : layouts)
    if (root()) row(layout, worst.text);
}

void Tables::absolute() {
  title("One process: is its own gradient right?", "");
  if (!root()) return;
  const StepSettings s = verify_settings(plain_, small_);
  const Measured exact = alone(small_, s);
  const WholeTensors weights = read_whole(small_);
  double square = 0, loss[2];
  for (const Part& part : each_parameter(gpt_bigcode_table(small_.config)))
    square += std::pow(likeness(part, exact.gradient, exact.gradient).norm, 2);
  const double norm = std::sqrt(square);
  row("norm over the root of all elements' squares", figure("norm", exact.result.grad_norm / norm, 1, 1e-5).text);
  for (const int side : {0, 1}) {
    VerifyCase ahead = small_;
    ahead.weights = [&](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
      for (auto e = static_cast<std::size_t>(first); e < static_cast<std::size_t>(first + count); ++e)
        *out++ = weights[i][e] + static_cast<float>((side ? 0.01 : -0.01) * exact.gradient[i][e] / norm);
    };
    loss[side] = alone(ahead, s).result.loss;
  }
  // 1e-3: the third derivative over 0.01, and the rounding of two losses that differ by 0.02 of the norm.
  row("slope of the loss along the gradient, over the norm",
      figure("slope", (loss[1] - loss[0]) / 0.02 / norm, 1, 1e-3).text);
}

void Tables::small_buckets() {
  title("A parameter larger than its bucket takes no other path: weights / biases",
        "DeepSpeed 0.19.8, ZeRO-3, reduce_scatter off, local loss, measured: weight / bias");
  for (const Layout& layout : {sp2, sp4}) {
    StepSettings s = verify_settings(plain_, small_);
    s.micro_batch = small_.batch.rows;  // one reduction: small buckets are many messages
    const auto bucket = [&](double elements) { s.zero.reduction.bucket_mb = elements * 4 / 1048576; };
    bucket(10);
    stages("bucket of 10 elements, ZeRO-0 to 3", layout, small_, s, layout.sp == 2 ? "0.5 / 1" : "0.25 / 1");
    const std::string what = str("buckets of 3, 17, 1000 and 10^9 elements, sp=", layout.sp);
    if (lacks(what, layout, "")) continue;
    s.zero.stage = 3;
    WholeTensors first;
    int equal = 0;
    for (const double elements : {3.0, 17.0, 1000.0, 1e9}) {
      bucket(elements);
      const WholeTensors g = step(layout, small_, s).gradient;
      if (first.empty()) first = g;
      equal += g == first;
    }
    row(what, figure(what + ", equal bits", equal, 4, 0, "%.0f of 4 with the same bits").text);
  }
}

void Tables::good_tokens() {
  const std::int64_t T = small_.batch.seq_len;
  const StepSettings s = verify_settings(plain_, small_);
  const auto with = [&](std::int64_t rows, const std::function<bool(std::int64_t, std::int64_t)>& good) {
    return relabelled(small_, rows, good);
  };
  title("Good tokens that differ between shards or replicas: weights / biases", "DeepSpeed 0.19.8, measured");
  stages("shards with 1 and 3 good tokens", sp2, with(1, [=](auto, auto t) { return t == 1 || t >= T - 3; }), s,
         "0.6965 / 0.8648, residual 0.28 (mean of shard means / sp)");
  stages("replicas with 1 and 3 good tokens", dp2, with(2, [](auto row, auto t) { return t < 1 + 2 * row; }), s,
         "1.0665 / 1.0411, residual 0.13 (replicas averaged)");

  title("Labels shifted inside each shard lose the target across its boundary", "DeepSpeed #5248, by its code");
  for (const Layout& layout : {sp2, sp4}) {
    const std::string what = str("targets of a row of ", T, " tokens, sp=", layout.sp), theirs = str(T - layout.sp);
    const VerifyCase c = with(1, [=](auto, auto t) { return t + 1 < T; });
    if (!lacks(what, layout, theirs)) {
      const Measured m = step(layout, c, s);
      row(what, figure(what, static_cast<double>(m.result.good_tokens), static_cast<double>(T - 1), 0, "%.0f").text,
          theirs);
    }
    stages("gradient of the one target across", layout, with(1, [=](auto, auto t) { return t == T / layout.sp - 1; }),
           s, "none: it is lost");
  }

  title("A shard, a replica, a micro-batch, a step without good tokens",
        "a mean over no token (pytorch #70348, transformers #47068)");
  stages("all of shard 0 ignored", sp2, with(1, [=](auto, auto t) { return t >= T / 2; }), s, "NaN, also times 0");
  const VerifyCase second = with(2, [](auto row, auto) { return row == 1; });
  stages("all of replica 0 ignored", dp2, second, s, "NaN");
  stages("all of micro-batch 0 ignored", one, second, s, "NaN");
  for (const Layout& layout : {one, dp2, sp2, tp2}) {
    const std::string what = "every label ignored, " + layout.text(),
                      theirs = "NaN, or a failed assertion (DeepSpeed #5223)";
    if (lacks(what, layout, theirs)) continue;
    const Measured m = step(layout, with(2, [](auto, auto) { return false; }), s);
    figure(what + ", step skipped", m.result.outcome == StepResult::Outcome::no_good_tokens, 1, 0);
    row(what,
        figure(what + ", loss", m.result.loss, 0, 0, "loss %.0f").text +
            figure(what + ", norm", m.result.grad_norm, 0, 0, ", norm %.0f").text +
            figure(what + ", weights that moved", moved(m), 0, 0, ", %.0f weights moved").text,
        theirs);
  }
}

void Tables::accumulation() {
  title("Accumulation is no mean of means: one part with 1 token of loss 4, one with 3 tokens of loss 1 each",
        "mean of means (transformers #34191)");
  VerifyCase c = relabelled(known_losses(small_), 2, [](auto, auto) { return false; });
  for (const std::int64_t t : {0, 2, 3}) c.batch.labels[static_cast<std::size_t>(c.batch.seq_len + t)] = 1;
  c.batch.labels[1] = 0;
  StepSettings s = verify_settings(plain_, c);
  for (const Layout& layout : {one, dp2, sp2, tp2, tp4}) {
    const std::string what = str("loss, ", 2 / layout.dp, " micro-batches a rank, ", layout.text());
    if (lacks(what, layout, "2.5000")) continue;
    row(what, figure(what, step(layout, c, s).result.loss, 1.75, 1e-5).text, "2.5000");
  }
  const VerifyCase four = relabelled(small_, 4, [](auto row, auto t) { return t <= 2 * row; });
  s.zero.reduction.bucket_mb = 1000 * 4 / 1048576.0;  // some are reduced before the next micro-batch begins
  for (const std::int64_t rows : {2, 1}) {
    s.micro_batch = rows;
    for (const Layout& layout : {one, dp2})
      stages(str("gradient, ", 4 / layout.dp / rows, " micro-batches a rank"), layout, four, s);
  }
}

void Tables::clipping() {
  title("Steps over the exact gradient: a clip at 1.5 times the true norm must not act, one at half of it halves",
        "DeepSpeed 0.19.8, ALST's loss, measured");
  StepSettings s = verify_settings(plain_, small_);
  const double norm = world_.exchange(root() ? alone(small_, s).result.grad_norm : 0.0)[0];
  for (const Layout& layout : {one, dp2, sp2, tp2}) {
    s.clip_norm = 1.5 * norm;
    stages("clip at 1.5 norms", layout, small_, s, layout.sp == 2 ? "1.5 (ZeRO-0 to 2: clips twice the gradient)" : "");
    s.clip_norm = 0.5 * norm;
    stages("clip at half the norm", layout, small_, s, "", 0.5);
  }
}

// The trainer's gradients and norm over a fused projection whose gradient is written by hand: two Q rows of norms 3 and
// 4, four K/V rows of norm 12 together; each rank has a share of it.
Cell Tables::known_norm(Layout layout, int kind) {
  Communicator* const ranks = group(layout.world());
  if (!ranks) return {};
  layout.rank = ranks->rank();
  ParameterTable table;
  table.parameters = {{"c_attn.weight", {2 + 4, 4}, 0, TpRule::fused_qkv, 4, 0, 0, true}};
  table.units = 1;
  Cell worst;
  for (int run = 0; run < 8; ++run) {
    const std::unique_ptr<Device> device = make_device(plain_, false);
    Mesh mesh(*ranks, layout);
    const Placement place(table, layout);
    const DType wire = run < 4 ? DType::float32 : DType::bfloat16;
    const auto gradients = make_gradients(*device, mesh, place, {run % 4, {reductions[kind], 32, wire}, wire});
    std::vector<float> values;
    for (int e = 0; e < 20; ++e) {
      const float q = layout.tp_rank() == 0 ? 1.5f : 2.0f, kv = 3.0f / static_cast<float>(layout.tp);
      values.push_back((e < 4 ? q : kv) / static_cast<float>(layout.shards()));
    }
    gradients->begin_step(1);
    device->upload(gradients->open(0).tensors[0], values.data());
    gradients->close(0);
    gradients->finish();
    const Tensor scratch = device->allocate(Kind::workspace, DType::float64, {1});
    const double norm = gradient_norm(*device, mesh, place, *gradients, scratch);
    const std::string what = str("norm, ", layout.text(), ", ZeRO-", run % 4, " ", name_of(wire));
    Cell cell = figure(what, norm, 13, 1e-9);
    cell.text += figure(what + ", coefficient", clip_coefficient(norm, 1), 1.0 / 13, 1e-9, " (%.6f)").text;
    worst.keep_worse(cell);
  }
  return worst;
}

void Tables::tensor_parallel() {
  title(
      "Clip norm of a fused MQA projection, Q gradients 3 and 4, K/V rows 12 on both tp ranks: 13 (1/13 at max_norm 1)",
      "DeepSpeed 0.19.8, c_attn marked tensor-parallel, measured");
  for (const Layout& layout : {tp2, dp2_tp2, sp2_tp2}) {
    for (int kind = 0; kind < 3; ++kind) {
      const std::string what = str("ZeRO-0 to 3, fp32 and bf16, ", reduction_names[kind], ", ", layout.text());
      const std::string theirs = kind == 0 ? "17.6918 (0.056523); ZeRO-0 bf16 12.3693" : "";
      if (!lacks(what, layout, theirs)) row(what, known_norm(layout, kind).text, theirs);
    }
  }

  title("K/V gradients of c_attn are summed over tp: K/V rows by stage", "DeepSpeed 0.19.8, automatic TP, measured");
  StepSettings s = verify_settings(plain_, small_);
  const Measured exact = alone(small_, s);
  for (const Layout& layout : {tp2, tp4, dp2_tp2}) {
    const std::string what = "K/V rows, " + layout.text();
    const std::string theirs = layout.tp == 2 ? "0.5610 and 0.4390; copies drift 2.4e-2 apart" : "";
    if (lacks(what, layout, theirs)) continue;
    std::string text;
    for (int stage = 0; stage < 4; ++stage) {
      s.zero.stage = stage;
      const Measured m = step(layout, small_, s);
      if (!root()) continue;
      const double ratio = likeness(parameter_groups(small_.config)[2], m.gradient, exact.gradient).ratio;
      text += figure(str(what, ", ZeRO-", stage), ratio, 1, 1e-5).text + " ";
      figure(str(what, ", ZeRO-", stage, ", copies that differ: ", m.replicas), !m.replicas.empty(), 0, 0);
    }
    row(what, text + "copies equal", theirs);
  }

  title("8 SGD steps at tp=2 dp=2, max_norm=1.0: largest distance of the losses from one process's",
        "DeepSpeed #9030, with its fault: 4.7e-4");
  s.clip_norm = 1;
  s.zero = verify_settings(plain_, small_).zero;
  const Measured process = alone(small_, s, 8, 0.25);
  for (int run = 0; run < 8; ++run) {
    const bool rounds = run >= 4;
    s.zero.stage = run % 4;
    s.zero.reduction.kind = reductions[run % 3];
    s.zero.dtype = rounds ? DType::bfloat16 : DType::float32;
    const std::string what = str("ZeRO-", s.zero.stage, " ", reduction_names[run % 3], " ", name_of(s.zero.dtype));
    if (lacks(what, dp2_tp2, "")) continue;
    const Measured m = step(dp2_tp2, small_, s, 8, 0.25);
    double gap = 0;
    for (std::size_t i = 0; i < process.losses.size(); ++i)
      gap = std::max(gap, std::abs(process.losses[i] - m.losses[i]));
    figure(what + ", copies that differ: " + m.replicas, !m.replicas.empty(), 0, 0);
    // bfloat16 is compared with float32: its rounded weights move the losses by some 1e-2, copies left behind by 1.
    const Cell cell = figure(what + ", losses", gap, 0, rounds ? 1e-1 : 1e-5, "%.0e");
    if (root()) row(what, str(cell.text, " (", m.losses.front(), " to ", m.losses.back(), ")"));
  }
}

void Tables::dividing_by_sp() {
  title("Do I divide the loss by sp? Not here. Shard means / sp are right where shards have equally many good tokens",
        "shard means / sp | their sum (DeepSpeed #5248)");
  for (const int n : {3, 2}) {  // good tokens of shard 0, of 4
    VerifyCase c = relabelled(known_losses(small_), 1, [](auto, auto) { return false; });
    std::fill_n(c.batch.labels.begin(), n, 2);
    std::fill_n(c.batch.labels.begin() + c.batch.seq_len / 2, 4 - n, 3);
    const std::string what = str("shard losses 2 and 6, of ", n, " and ", 4 - n, " good tokens");
    const std::string theirs = n == 3 ? "4.0 | 8.0" : "4.0, right | 8.0";
    if (lacks(what, sp2, theirs)) continue;
    const Measured m = step(sp2, c, verify_settings(plain_, c));
    row(what, figure(what, m.result.loss, (2.0 * n + 6.0 * (4 - n)) / 4, 1e-5).text, theirs);
  }
}

void Tables::everything_else() {
  title("The rest, over all layouts that fit: the worst", "reported elsewhere");
  struct Variant {
    const char* name;
    bool multi_query, tied;
    float dropout;
    DType dtype;
    Recompute recompute;
    const char* reported;
  };
  const Variant variants[] = {
      {"multi-head attention, untied head", false, false, 0, DType::float32, Recompute::none, ""},
      {"dropout 0.1, block recompute", true, true, 0.1f, DType::float32, Recompute::block, ""},
      {"multi-head, dropout 0.1, light recompute", false, true, 0.1f, DType::float32, Recompute::light, ""},
      {"bfloat16, all stages: gradient, and norm within 1e-2", true, true, 0, DType::bfloat16, Recompute::none,
       "ZeRO-0 bf16 norm 12.3693 for 13"}};
  for (const Variant& v : variants) {
    VerifyCase c = small_case(world_.size(), v.multi_query, v.tied);
    c.config.embd_pdrop = c.config.resid_pdrop = c.config.attn_pdrop = v.dropout;
    StepSettings s = verify_settings(plain_, c);
    s.recompute = v.recompute;
    s.zero.dtype = v.dtype;
    const Measured exact = alone(c, s);
    Cell worst;
    int stage = 0;
    for (const Shape& shape : shapes(c, false)) {
      s.sp_mode = shape.mode;
      for (int run = 0; run < (v.dtype == DType::bfloat16 && shape.layout.shards() > 1 ? 4 : 1); ++run) {
        s.zero.stage = stage++ % 4;
        const std::string what = str(v.name, ", ", shape.text(), ", ZeRO-", s.zero.stage);
        worst.keep_worse(judged(what, c, step(shape.layout, c, s), exact, 1, v.dtype));
      }
    }
    row(v.name, worst.text, v.reported);
  }

  VerifyCase bad = small_;  // no number at the last position, which one sp rank has
  bad.weights = [=, inner = small_.weights, at = (small_.batch.seq_len - 1) * small_.config.n_embd](
                    std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    inner(i, first, count, out);
    if (i == 1 && first <= at && at < first + count) out[at - first] = std::nanf("");  // of wpe
  };
  Cell worst;
  for (const Shape& shape : shapes(bad, false)) {
    StepSettings s = verify_settings(plain_, bad);
    s.sp_mode = shape.mode;
    s.zero.stage = 0;  // in which ranks that disagree do not wait for each other
    const Measured m = step(shape.layout, bad, s);
    const std::string what = "a gradient that is no number, " + shape.text();
    figure(what + ", step skipped", m.result.outcome == StepResult::Outcome::not_finite, 1, 0);
    worst.keep_worse(figure(what + ", weights that moved", moved(m), 0, 0, "%.0f"));
  }
  row("a gradient that is no number: weights that moved", worst.text,
      "applied in bf16 (#8035); norm * 0 = NaN (#7171)");
}

int Tables::finish() {
  const int off = world_.exchange(static_cast<int>(off_.size()))[0];
  if (!root()) return off;
  if (lacking_) std::printf("\n%d rows need more ranks: mpirun -n 4 onescale verify\n", lacking_);
  std::printf(off ? "\n%d figures are off:\n" : "\nall figures are right\n", off);
  for (std::size_t i = 0; i < std::min<std::size_t>(off_.size(), 50); ++i) std::printf("   %s\n", off_[i].c_str());
  return off;
}

}  // namespace

int verify_tables(const Options& options, Communicator& world, const VerifyCase& c) {
  Tables tables(options, world, c);
  tables.gradients();
  tables.absolute();
  tables.small_buckets();
  tables.good_tokens();
  tables.accumulation();
  tables.clipping();
  tables.tensor_parallel();
  tables.dividing_by_sp();
  tables.everything_else();
  return tables.finish();
}

}  // namespace onescale

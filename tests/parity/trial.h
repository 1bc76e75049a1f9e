// A training step on a group of ranks, set beside that of one process or beside the golden numbers.
#pragma once

#include <string>

#include "tests/parity/report.h"
#include "train/session.h"
#include "train/step.h"

namespace onescale::parity {

struct Model {
  ModelConfig config;
  FetchRange fetch;  // the initial weights
};
// 8 heads, so that every sp * tp up to 8 fits; a vocabulary of 27 that no tp divides. All weights and biases are
// random.
Model small_model(bool multi_query, bool tied, bool dropout);
// Weights `scale` times as large; heads and vocabulary as given, 2 features a head.
Model other_model(std::int64_t heads, std::int64_t vocab, float scale);

// All that must change no gradient. zero.reduction.bucket_mb is given in elements here, 0: all in one.
struct Path {
  int dp = 1, sp = 1, tp = 1;
  std::int64_t micro_batches = 1;
  int stage = 0;
  Reduction reduction = Reduction::ordered;
  double bucket = 0;
  SpMode sp_mode = SpMode::ulysses;
  DType dtype = DType::float32;
  Recompute recompute = Recompute::none;
  DType wire = DType::float32;

  int world() const { return dp * sp * tp; }
  std::string text() const;
  // For `rows` rows of seq_len tokens over all ranks; SGD without clipping.
  StepSettings settings(std::int64_t rows, std::int64_t seq_len) const;
};

using Whole = std::vector<std::vector<float>>;  // every tensor, in table order

struct Trial {
  Trial(Mesh& mesh, const Model& model, const StepSettings& settings);
  // On rank 0 of the mesh; elsewhere empty.
  Whole gradients() { return gather(step.gradient_source()); }
  Whole masters() { return gather(weights.source()); }
  Whole gather(const Assembly::Source& source);

  std::unique_ptr<Device> device;
  ModelWeights weights;
  Step step;
};

inline constexpr std::uint64_t seed = 7;

// What a gradient may differ by, per whole tensor: relative L2 error, and the ratio <g, ref> / <ref, ref> from 1.
struct Tolerance {
  double error, ratio;
};
Tolerance tolerance(const Path& path);

// Every gradient within the tolerance; the K part of c_attn.bias, whose exact gradient is 0, below 1e-6 of its tensor's
// norm in float32 and otherwise left out.
void compare_gradients(Report& report, const ParameterTable& table, const ModelConfig& config, const Whole& got,
                       const std::vector<std::vector<double>>& want, const Path& path);
// Zeroes the K part of c_attn.bias.
void clear_key_bias(const ModelConfig& config, const std::string& name, std::vector<double>& x);
std::vector<double> widened(const std::vector<float>& x);
bool near(double x, double want, double relative);

// One SGD step and the loss of the next on every rank of `group`, against one process; clip: the limit over the exact
// norm, 0 for none. Also: results alike on all ranks, the same collectives in the same order, replicas alike, memory
// and collectives as planned.
void compare_step(Communicator& group, Report& report, const Model& model, const HostBatch& batch, const Path& path,
                  double clip);

}  // namespace onescale::parity

// What `onescale verify` measures: the weight change of one real optimizer step in some layout, read as a gradient, and
// how it compares with another. The loss, the reductions, the norm, the clip and the update are the trainer's own.
#pragma once

#include <cmath>

#include "train/plain_forward.h"
#include "train/session.h"

namespace onescale {

// All that a gradient may depend on; and in the options how it is found: dtype, recompute, zero, reduction and so on.
// Those of small_case and model_case are gradient_of() already. micro_batch is 0: half of a rank's rows, or one row
// where they are odd.
struct VerifyCase {
  ModelConfig config;
  FetchRange weights;
  HostBatch batch;
  Options options;
};

// The case as one SGD step without clipping, at a learning rate that is a power of two: exact to divide by, and so
// large that rounding the new weight takes nothing from small gradients.
VerifyCase gradient_of(VerifyCase c);
// A small model made in memory, with none of its weights zero or one, whose sizes are odd where no layout of `world`
// ranks has to divide them; n_head is divisible by 4 too. The batch has 2 rows a rank, all tokens are good.
VerifyCase small_case(const Options& options, int world, bool multi_query = true, bool tied = true);
// A model of a directory, which must outlive the case, without dropout.
VerifyCase model_case(const Options& options, const ModelSource& source, HostBatch batch);
// The model with fewer blocks, and then a smaller vocabulary, where a step of one process would take more than `memory`
// bytes. `source` is the case's.
void cut_to_memory(VerifyCase& c, const ModelSource& source, std::int64_t memory);

// The first `rows` rows, in which labels are ignored where `good` does not say otherwise.
VerifyCase masked(VerifyCase c, std::int64_t rows, const std::function<bool(std::int64_t row, std::int64_t t)>& good);
// The batch several times over, whose mean loss and its gradient are those of the batch.
VerifyCase repeated(VerifyCase c, int times);
// Row r ignores its first tokens, ever more of them, so that no two shards or micro-batches hold equally many good
// tokens.
VerifyCase uneven(const VerifyCase& c);
// A model whose loss is known in closed form: on each of tokens 0 to 3 it loses 4, 1, 2 and 6 whatever came before. The
// first `rows` rows, without good tokens yet.
VerifyCase known_losses(const VerifyCase& small, std::int64_t rows);

// All parameters' elements by table position; empty but on rank 0 of the ranks that took part.
using WholeTensors = std::vector<std::vector<float>>;

inline constexpr std::uint64_t verify_seed = 7;  // of dropout
struct Measured {
  StepResult result;
  WholeTensors gradient;       // the weight change over the learning rate
  std::vector<double> losses;  // of each step
  std::string replicas;        // what check_replicas found after the last step; empty: all copies are equal
};
// The case's steps in this layout of the first ranks; nothing on the others. Every rank of the layout calls it, others
// may.
Measured measure(Communicator& world, const Layout& layout, const VerifyCase& c);
// The same on rank 0 alone, the whole batch at once.
Measured measure_alone(Communicator& world, VerifyCase c);
// The mesh of the first ranks; nullptr on the others.
std::unique_ptr<Mesh> first_ranks(Communicator& world, Layout layout);

// Elements that are judged together: stretches of parameters.
struct Part {
  struct Range {
    std::size_t parameter;
    std::int64_t begin, end;
  };
  std::string name;
  std::vector<Range> ranges;
};
// "embeddings", "c_attn Q rows", "c_attn K/V rows", "attention c_proj", "mlp", "layer norms" and, untied, "head".
std::vector<Part> parameter_groups(const ModelConfig& config);

// ratio <g, ref> / <ref, ref>; residual |g - ratio * ref| / |ref|, which no factor explains; norm |ref|. Where ref is
// 0 both are infinite, or, if g is 0 too, the ratio is no number and the residual 0.
struct Likeness {
  double ratio, residual, norm;
};
Likeness likeness(const Part& part, const WholeTensors& g, const WholeTensors& ref);
double squares(const std::vector<float>& x);  // their sum
// Of two distances from what is right. One that is no number is worse than any other.
inline bool worse(double a, double b) {
  return !std::isnan(b) && !(a <= b);
}

// What a plain float64 forward says of a case, with the dropout of its first step.
PlainWeights plain_weights(const VerifyCase& c);
double plain_loss(const VerifyCase& c, const PlainWeights& weights);
// Stretches of every tensor, each of which could be wrong alone: Q, K and V of c_attn, each row of wpe that rows of
// seq_len tokens read and the rest of it, quarters of the rows of other matrices, whole vectors.
std::vector<Part> tensor_parts(const ModelConfig& config, std::int64_t seq_len);
// Slopes of the loss along random directions in a part, of length 1 and dense: no component is below half the largest.
struct Slopes {
  Part part;
  std::vector<std::vector<double>> directions;  // over the part's elements
  std::vector<double> values;
};
std::vector<Slopes> plain_slopes(const VerifyCase& c, const std::vector<Part>& parts);
bool plain_is_flat(const VerifyCase& c, const Part& part);  // has exactly no slope
// The part in which a gradient has most another slope, and by how much of the part's norm, or of a tenth of its
// tensor's where that is more: the K part of c_attn.bias has an exact gradient of 0.
std::pair<double, std::string> worst_slope(const std::vector<Slopes>& plain, const WholeTensors& gradient);
// The weight change over the learning rate that the case's steps have in float64, the gradients being those of one
// process.
WholeTensors plain_updates(Communicator& world, const VerifyCase& c);

// Another trainer's gradients beside ours: prints, by group of parameters, ratio, residual and the likeliest cause; 0
// when all agree, else 1. The options' file `against` holds tensors by Hugging Face name, with or without "grad." and
// "transformer.", and may hold "grad_norm" and "loss". Every rank of `world` calls it; the options' layout is that of
// our own step.
int verify_against(const Options& options, Communicator& world);

}  // namespace onescale

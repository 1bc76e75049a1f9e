// What `onescale verify` measures: the weight change of one real optimizer step in some layout, read as a gradient, and
// how it compares with another. The loss, the reductions, the norm, the clip and the update are the trainer's own.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "train/session.h"

namespace onescale {

// All that a gradient may depend on.
struct VerifyCase {
  ModelConfig config;
  FetchRange weights;
  HostBatch batch;
};

// A small model made in memory, with none of its weights zero or one, whose sizes are odd where no layout of `world`
// ranks has to divide them. The batch has 2 rows a rank; row r ignores its first tokens, ever more of them, so that no
// two shards or micro-batches hold equally many good tokens.
VerifyCase small_case(int world, bool multi_query = true, bool tied = true);
std::int64_t small_heads(int world);  // of that model: divisible by world and by 4
// A model whose loss is known in closed form: on each of tokens 0 to 3 it loses 4, 1, 2 and 6 whatever came before.
VerifyCase known_losses(const VerifyCase& small);

// A model of a directory, which must outlive the case, with the options' batch or with tokens like the small one's for
// `ranks`; with fewer blocks, and then a smaller vocabulary, where a step of one process would take more than `memory`
// bytes.
VerifyCase model_case(const Options& options, const ModelSource& source, int ranks, std::int64_t memory);

// All parameters' elements by table position; empty but on rank 0 of the ranks that took part.
using WholeTensors = std::vector<std::vector<float>>;
WholeTensors read_whole(const VerifyCase& c);

// The learning rate of that step is a power of two: exact to divide by, and so large that rounding the new weight takes
// nothing from small gradients.
inline constexpr double verify_lr = 1 << 20;

struct Measured {
  StepResult result;
  WholeTensors gradient;       // the weight change / verify_lr
  std::vector<double> losses;  // of each step
  std::string replicas;        // what check_replicas found after the last step; empty: all copies are equal
};

// StepSettings of a verification: the options' settings, SGD, no clipping; micro_batch is 0, which measure() takes for
// half of a rank's rows (one row where they are odd).
StepSettings verify_settings(const Options& options, const VerifyCase& c);

// SGD steps from the case's weights in this layout. Every rank of `group`, which has layout.world() ranks, calls it.
// With several steps, at learning rate lr, gradients are not read.
Measured measure(const Options& options, Communicator& group, const Layout& layout, const VerifyCase& c,
                 StepSettings settings, int steps = 1, double lr = verify_lr);
// The same in this process alone, the whole batch at once.
Measured measure_alone(const Options& options, const VerifyCase& c, StepSettings settings, int steps = 1,
                       double lr = verify_lr);

// Elements that are judged together: stretches of parameters.
struct Part {
  struct Range {
    std::size_t parameter;
    std::int64_t begin, end;
  };
  std::string name;
  std::vector<Range> ranges;
};
std::vector<Part> each_parameter(const ParameterTable& table);
// "embeddings", "c_attn Q rows", "c_attn K/V rows", "attention c_proj", "mlp", "layer norms" and, untied, "head".
std::vector<Part> parameter_groups(const ModelConfig& config);

// ratio <g, ref> / <ref, ref>; error |g - right * ref| / |right * ref|; residual |g - ratio * ref| / |ref|, which no
// factor explains; norm |ref|. Where ref is 0: 1, 0, 0 if g is 0 too, else infinite.
struct Likeness {
  double ratio, error, residual, norm;
};
Likeness likeness(const Part& part, const WholeTensors& g, const WholeTensors& ref, double right = 1);

// Tables, one a reported fault of other trainers: our figure, measured now, beside the faulty one. The case's gradient
// in every layout, stage, reduction and sp_mode that fits, or in those that the options give, then the faults on small
// models of their own. Every rank of `world` calls it; rank 0 prints, ending with a sentence for each figure that is
// off. Layouts of fewer ranks run on the first ones. Returns how many are off.
int verify_tables(const Options& options, Communicator& world, const VerifyCase& c);

// Another trainer's gradients beside ours: prints, by group of parameters, ratio, residual and the likeliest cause; 0
// when all agree, else 1. The options' file `against` holds tensors by Hugging Face name, with or without "grad." and
// "transformer.", and may hold "grad_norm" and "loss". Every rank of `world` calls it; the options' layout is that of
// our own step.
int verify_against(const Options& options, Communicator& world);

}  // namespace onescale

// `onescale plan`: memory by kind and FLOPs per token of a training step, without running it.
#include "kernels/error.h"
#include "train/commands.h"
#include "train/evaluate.h"
#include "train/session.h"

namespace onescale {

int plan_command(const Options& options) {
  const ModelConfig config =
      options.model.empty() ? config_from_options(options, 0) : ModelSource(options.model).config();
  const std::int64_t T = options.seq_len ? options.seq_len : config.n_positions;
  const StepSettings settings = step_settings(options, T);
  const std::unique_ptr<Device> device = make_device(options, true);
  ModelWeights weights(*device, config, settings.dtype);
  Step step(weights, settings);
  Evaluator evaluator(weights, step.model(), settings.micro_batch, T);
  step.run_empty();
  const FlopsPerToken flops = flops_per_token(config, T);
  std::printf(
      "parameters       %lld\nmicro-batch      %lld x %lld tokens, %s, recompute %s\nmemory\n%sFLOPs per token  %.4g "
      "by 6 N, %.4g with attention\n",
      static_cast<long long>(config.parameters()), static_cast<long long>(settings.micro_batch),
      static_cast<long long>(T), options.dtype.c_str(), options.recompute.c_str(), memory_table(*device).c_str(),
      flops.parameters, flops.with_attention);
  return 0;
}

}  // namespace onescale

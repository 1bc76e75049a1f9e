// `onescale plan`: memory by kind and FLOPs per token of a training step, without running it.
#include "kernels/error.h"
#include "train/commands.h"
#include "train/evaluate.h"
#include "train/layout_check.h"
#include "train/session.h"

namespace onescale {

int plan_command(const Options& options) {
  const ModelConfig config =
      options.model.empty() ? config_from_options(options, 0) : ModelSource(options.model).config();
  const std::int64_t T = options.seq_len ? options.seq_len : config.n_positions;
  const Layout layout =
      make_layout(static_cast<int>(options.world), 0, static_cast<int>(options.sp), static_cast<int>(options.tp));
  check_layout(config, T, layout, options.sp_mode);
  check_batch(options.global_batch, options.micro_batch, layout);
  const StepSettings settings = step_settings(options, T);
  const std::unique_ptr<Device> device = make_device(options, true);
  const std::unique_ptr<Mesh> mesh = Mesh::recording(layout);
  ModelWeights weights(*device, *mesh, config, settings.zero);
  Step step(weights, settings);
  Evaluator evaluator(weights, step.model(), settings.micro_batch, T);
  for (Communicator* group : mesh->groups()) group->reset_traffic();
  step.run_empty(options.global_batch / layout.dp / options.micro_batch);
  const FlopsPerToken flops = flops_per_token(config, T);
  std::printf(
      "parameters       %lld\nmicro-batch      %lld x %lld tokens, %s, recompute %s\nlayout           %s, zero %lld\n"
      "memory of a rank\n%sFLOPs per token  %.4g by 6 N, %.4g with attention\n",
      static_cast<long long>(config.parameters()), static_cast<long long>(settings.micro_batch),
      static_cast<long long>(T), options.dtype.c_str(), options.recompute.c_str(), layout.text().c_str(),
      static_cast<long long>(options.zero), memory_table(*device).c_str(), flops.parameters, flops.with_attention);
  for (const Communicator* group : mesh->groups()) {
    for (const auto& [operation, count] : group->traffic().operations) {
      if (group->size() == 1) continue;
      std::printf("%-16s %-16s %8lld calls, %s sent a rank and step\n", group->name().c_str(), operation.c_str(),
                  static_cast<long long>(count.calls), bytes_text(static_cast<double>(count.bytes)).c_str());
    }
  }
  return 0;
}

}  // namespace onescale

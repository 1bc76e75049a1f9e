// `onescale gradients`: loss, norm and every gradient of one batch, for comparison with another program.
#include <filesystem>

#include "kernels/error.h"
#include "model/decoder.h"
#include "parallel/agreement.h"
#include "train/commands.h"
#include "train/layout_check.h"
#include "train/session.h"

namespace onescale {

namespace {

// The ids below vocab_size of a tensor, or `ignored`.
std::vector<std::int32_t> read_ids(const SafetensorsReader& file, const StoredTensor& tensor, std::int64_t vocab_size,
                                   std::int64_t ignored) {
  std::vector<std::int64_t> wide(static_cast<std::size_t>(tensor.numel()));
  file.read(tensor, 0, tensor.numel(), wide.data());
  std::vector<std::int32_t> ids(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    ids[i] = static_cast<std::int32_t>(wide[i]);
    check((wide[i] >= 0 && wide[i] < vocab_size) || wide[i] == ignored, file.path(tensor), ": ", tensor.name, " holds ",
          wide[i], " at element ", i, ", which is no id below vocab_size ", vocab_size,
          ignored < 0 ? " nor -100 (ignored)" : "", "; write the file with the model's tokenizer");
  }
  return ids;
}

}  // namespace

HostBatch read_batch(const std::string& path, const ModelConfig& config) {
  const SafetensorsReader file(path);
  const StoredTensor& ids = file.at("input_ids");
  const StoredTensor& labels = file.at("labels");
  check(ids.shape.size() == 2 && ids.shape == labels.shape, path,
        ": input_ids and labels must be of one shape [rows, T], they are ", ids.describe(), " and ", labels.describe());
  check(ids.numel() > 0, path, ": input_ids ", ids.describe(), " hold no token");
  check_usage(ids.shape[1] <= config.n_positions, path, ": rows of ", ids.shape[1],
              " tokens are longer than the model's n_positions ", config.n_positions, "; give shorter ones");
  HostBatch batch{ids.shape[0], ids.shape[1], read_ids(file, ids, config.vocab_size, 0),
                  read_ids(file, labels, config.vocab_size, -100)};
  check(count_good_tokens(batch.labels.data(), labels.numel()) > 0, path,
        ": every label is -100 (ignored), so there is no loss and no gradient; give the labels of some tokens");
  return batch;
}

int gradients_command(const Options& options, World& world) {
  Communicator& all = world.communicator();
  world.check_same("program or options", identity(options));
  const Layout layout = layout_of(options, all);
  const ModelSource source(options.model);
  ModelConfig config = source.config();
  config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0;
  std::error_code absent;
  check_usage(!std::filesystem::equivalent(options.batch, options.out, absent), "out ", options.out,
              " is the batch itself; give another file");
  const HostBatch batch = read_batch(options.batch, config);
  check_layout(config, batch.seq_len, layout, options.sp_mode);
  check_usage(batch.rows % layout.dp == 0, options.batch, " has ", batch.rows, " rows, which dp ", layout.dp,
              " does not divide; use fewer ranks or another batch");
  const std::int64_t rows = batch.rows / layout.dp, T = batch.seq_len;

  StepSettings settings = step_settings(options, T);
  if (settings.micro_batch == 0) settings.micro_batch = rows;
  check_batch(batch.rows, settings.micro_batch, layout);
  settings.optimizer.adamw = false;
  const std::unique_ptr<Device> device = planned_device(of_rank(options, all), layout, [&](Device& dry, Mesh& groups) {
    ModelWeights weights(dry, groups, config, settings.zero);
    Step step(weights, settings);
    step.run_empty(rows / settings.micro_batch);
    if (options.logits) Decoder(step.model(), T).append(std::span(batch.ids).first(1), weights.units());
  });
  Mesh mesh(all, layout);
  ModelWeights weights(*device, mesh, config, settings.zero);
  weights.load(source.fetch());
  Step step(weights, settings);
  const StepResult result = step.gradients(batch.of_rank(layout), 0, 0);
  check(result.outcome == StepResult::Outcome::updated, options.batch, ": the loss is ", result.loss,
        " and the gradient's norm ", result.grad_norm, ", which is no gradient to compare; the weights of ",
        source.dir(), " are damaged");

  // Rank 0 writes; a failure of it waits until the others have given their parts.
  const bool root = all.rank() == 0;
  const ParameterTable& table = weights.table();
  std::vector<StoredTensor> tensors = {
      {"loss", FileType::F64, {1}}, {"grad_norm", FileType::F64, {1}}, {"good_tokens", FileType::I64, {1}}};
  for (const Parameter& p : table.parameters) tensors.push_back({"grad." + p.name, FileType::F32, p.shape});
  if (options.logits) tensors.push_back({"logits", FileType::F32, {batch.rows, T, config.vocab_size}});
  std::optional<SafetensorsWriter> writer;
  on_root(all, [&] {
    writer.emplace(options.out, tensors);
    writer->write_bytes(&result.loss, sizeof result.loss);
    writer->write_bytes(&result.grad_norm, sizeof result.grad_norm);
    writer->write_bytes(&result.good_tokens, sizeof result.good_tokens);
  });
  std::vector<float> gradient;
  for (std::size_t i = 0; i < table.parameters.size(); ++i) {
    std::vector<std::int64_t> wanted(static_cast<std::size_t>(all.size()), -1);
    wanted[0] = static_cast<std::int64_t>(i);
    gradient.resize(root ? static_cast<std::size_t>(table.parameters[i].numel()) : 0);
    weights.assembly().gather(wanted, step.gradient_source(), gradient.data());
    on_root(all, [&] { writer->write(gradient.data(), static_cast<std::int64_t>(gradient.size())); });
  }
  if (options.logits) {
    Decoder decoder(step.model(), T);
    for (std::int64_t i = 0; i < batch.rows * T; ++i) {
      if (i % T == 0) decoder.reset();
      const std::vector<float>& logits =
          decoder.append(std::span(batch.ids).subspan(static_cast<std::size_t>(i), 1), weights.units());
      on_root(all, [&] { writer->write(logits.data(), config.vocab_size); });
    }
  }
  on_root(all, [&] { writer->close(); });
  if (root) {
    std::printf("loss %.9f  grad_norm %.9f  good_tokens %lld  -> %s\n", result.loss, result.grad_norm,
                static_cast<long long>(result.good_tokens), options.out.c_str());
  }
  return 0;
}

}  // namespace onescale

// `onescale gradients`: loss, norm and every gradient of one batch, for comparison with another program.
#include <filesystem>

#include "kernels/error.h"
#include "model/decoder.h"
#include "train/commands.h"
#include "train/session.h"

namespace onescale {

namespace {

std::vector<std::int32_t> read_ids(const SafetensorsFile& file, const StoredTensor& tensor) {
  std::vector<std::int64_t> wide(static_cast<std::size_t>(tensor.numel()));
  file.read(tensor, 0, tensor.numel(), wide.data());
  std::vector<std::int32_t> ids(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    ids[i] = static_cast<std::int32_t>(wide[i]);
    check(ids[i] == wide[i], file.path(), ": ", tensor.name, " holds ", wide[i], " at element ", i,
          ", which is no token id");
  }
  return ids;
}

}  // namespace

int gradients_command(const Options& options, World&) {
  const ModelSource source(options.model);
  ModelConfig config = source.config();
  config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0;
  std::error_code absent;
  check_usage(!std::filesystem::equivalent(options.batch, options.out, absent), "out ", options.out,
              " is the batch itself; give another file");
  const SafetensorsFile file(options.batch);
  const StoredTensor& ids_tensor = file.at("input_ids");
  const StoredTensor& labels_tensor = file.at("labels");
  check(ids_tensor.shape.size() == 2 && ids_tensor.shape == labels_tensor.shape, file.path(),
        ": input_ids and labels must be of one shape [rows, T], they are ", ids_tensor.describe(), " and ",
        labels_tensor.describe());
  const std::int64_t rows = ids_tensor.shape[0], T = ids_tensor.shape[1];
  check(rows > 0 && T > 0, file.path(), ": input_ids ", ids_tensor.describe(), " hold no token");
  const std::vector<std::int32_t> ids = read_ids(file, ids_tensor), labels = read_ids(file, labels_tensor);

  StepSettings settings = step_settings(options, T);
  if (settings.micro_batch == 0) settings.micro_batch = rows;
  settings.optimizer.adamw = false;
  settings.clip_norm = 0;
  const std::unique_ptr<Device> device = planned_device(options, [&](Device& dry) {
    ModelWeights weights(dry, config, settings.dtype);
    Step(weights, settings).run_empty();
    if (options.logits)
      Decoder(dry, config, T, settings.dtype)
          .append(std::span(ids).first(static_cast<std::size_t>(T)), weights.units());
  });
  ModelWeights weights(*device, config, settings.dtype);
  weights.load([&](std::size_t i, float* out) { source.read(i, out); });
  Step step(weights, settings);
  const StepResult result = step.gradients({ids.data(), labels.data(), rows}, 0, 0);

  std::vector<StoredTensor> tensors = {
      {"loss", FileType::F64, {1}}, {"grad_norm", FileType::F64, {1}}, {"good_tokens", FileType::I64, {1}}};
  for (const Parameter& p : weights.table().parameters) tensors.push_back({"grad." + p.name, FileType::F32, p.shape});
  if (options.logits) tensors.push_back({"logits", FileType::F32, {rows, T, config.vocab_size}});
  SafetensorsWriter writer(options.out, tensors);
  writer.write_bytes(&result.loss, sizeof result.loss);
  writer.write_bytes(&result.grad_norm, sizeof result.grad_norm);
  writer.write_bytes(&result.good_tokens, sizeof result.good_tokens);
  std::vector<float> gradient;
  for (std::size_t i = 0; i < weights.table().parameters.size(); ++i) {
    gradient.resize(static_cast<std::size_t>(weights.table().parameters[i].numel()));
    step.read_gradient(i, gradient.data());
    writer.write(gradient.data(), static_cast<std::int64_t>(gradient.size()));
  }
  if (options.logits) {
    Decoder decoder(*device, config, T, settings.dtype);
    for (std::int64_t i = 0; i < rows * T; ++i) {
      if (i % T == 0) decoder.reset();
      const std::vector<float>& logits =
          decoder.append(std::span(ids).subspan(static_cast<std::size_t>(i), 1), weights.units());
      writer.write(logits.data(), config.vocab_size);
    }
  }
  writer.close();
  std::printf("loss %.9f  grad_norm %.9f  good_tokens %lld  -> %s\n", result.loss, result.grad_norm,
              static_cast<long long>(result.good_tokens), options.out.c_str());
  return 0;
}

}  // namespace onescale

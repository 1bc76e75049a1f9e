#include "train/model_weights.h"

#include "model/parameters.h"

namespace onescale {

ModelWeights::ModelWeights(Device& device, const ModelConfig& config, DType dtype)
    : dev_(device),
      config_(config),
      table_(gpt_bigcode_table(config)),
      layout_(table_),
      units_(device, table_, layout_, dtype) {}

Tensor ModelWeights::part(Tensor unit, std::size_t parameter) const {
  return unit.slice(0, layout_.offset[parameter], layout_.offset[parameter] + table_.parameters[parameter].numel());
}

void ModelWeights::initialise(std::uint64_t seed) {
  for (std::size_t i = 0; i < table_.parameters.size(); ++i) {
    const Parameter& p = table_.parameters[i];
    const Tensor w = part(units_.master(p.unit).data, i);
    if (p.init_stddev > 0)
      dev_.random_normal(w, seed, static_cast<std::int64_t>(i), 0, p.init_stddev);
    else
      dev_.fill(w, p.init_mean);
    if (const Tensor compute = units_.compute(p.unit); !compute.empty()) dev_.copy(part(compute, i), w);
  }
}

void ModelWeights::load(const Fetch& fetch) {
  std::vector<float> whole;
  for (std::size_t i = 0; i < table_.parameters.size(); ++i) {
    const Parameter& p = table_.parameters[i];
    whole.resize(static_cast<std::size_t>(p.numel()));
    fetch(i, whole.data());
    const Tensor w = part(units_.master(p.unit).data, i);
    dev_.upload(w, whole.data());
    if (const Tensor compute = units_.compute(p.unit); !compute.empty()) dev_.copy(part(compute, i), w);
  }
}

void ModelWeights::read(std::size_t parameter, float* out) {
  dev_.download(out, part(units_.master(table_.parameters[parameter].unit).data, parameter));
}

}  // namespace onescale

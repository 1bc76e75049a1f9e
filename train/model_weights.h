// A model's weights on a device, and the ways in and out of them as whole logical tensors in table order.
#pragma once

#include "model/hf_files.h"
#include "parallel/replicated.h"

namespace onescale {

class ModelWeights {
 public:
  // dtype: of the copy that the model multiplies with; masters are float32.
  ModelWeights(Device& device, const ModelConfig& config, DType dtype);
  ModelWeights(const ModelWeights&) = delete;
  ModelWeights& operator=(const ModelWeights&) = delete;

  // From the table's initialisers, keyed by (seed, tensor, element).
  void initialise(std::uint64_t seed);
  void load(const Fetch& fetch);
  void read(std::size_t parameter, float* out);

  // The elements of a parameter in a flat buffer that holds its whole unit.
  Tensor part(Tensor unit, std::size_t parameter) const;

  const ModelConfig& config() const { return config_; }
  const ParameterTable& table() const { return table_; }
  const FlatLayout& layout() const { return layout_; }
  Weights& units() { return units_; }
  Device& device() { return dev_; }

 private:
  Device& dev_;
  ModelConfig config_;
  ParameterTable table_;
  FlatLayout layout_;
  ReplicatedWeights units_;
};

}  // namespace onescale

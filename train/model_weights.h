// A model's weights on a device, and the ways in and out of them as whole logical tensors in table order.
#pragma once

#include "model/hf_files.h"
#include "parallel/assembly.h"

namespace onescale {

// Fills `out` with elements [first, first + count) of the whole tensor at this position of the table.
using FetchRange = std::function<void(std::size_t parameter, std::int64_t first, std::int64_t count, float* out)>;

// This rank's part of every tensor is taken from whole ones; `keep(unit)` says where it goes.
void load_owned(Device& device, const Placement& place, const Assembly::Source& keep, const FetchRange& fetch);

class ModelWeights {
 public:
  ModelWeights(Device& device, Mesh& mesh, const ModelConfig& config, const ZeroSettings& zero = {});
  ModelWeights(const ModelWeights&) = delete;
  ModelWeights& operator=(const ModelWeights&) = delete;

  // From the table's initialisers, keyed by (seed, tensor, element).
  void initialise(std::uint64_t seed);
  void load(const FetchRange& fetch);
  // The masters, to assemble.
  Assembly::Source source() {
    return [this](int unit) { return units_->master(unit); };
  }
  // Whole tensors, assembled from a source over these units.
  Gather whole(const Assembly::Source& source) const {
    return
        [this, source](const std::vector<std::int64_t>& wanted, float* out) { assembly_.gather(wanted, source, out); };
  }

  const ModelConfig& config() const { return config_; }
  const ParameterTable& table() const { return place_.slices.whole(); }
  const Placement& place() const { return place_; }
  const Assembly& assembly() const { return assembly_; }
  Weights& units() { return *units_; }
  Device& device() { return dev_; }
  Mesh& mesh() { return mesh_; }

 private:
  void written();  // the masters: copies follow

  Device& dev_;
  Mesh& mesh_;
  ModelConfig config_;
  Placement place_;
  Assembly assembly_;
  std::unique_ptr<Weights> units_;
};

}  // namespace onescale

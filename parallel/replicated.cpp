#include "parallel/replicated.h"

namespace onescale {

ReplicatedWeights::ReplicatedWeights(Device& device, const ParameterTable& table, const FlatLayout& layout,
                                     DType dtype) {
  for (int unit = 0; unit < table.units; ++unit) {
    const std::int64_t n = layout.unit_numel[static_cast<std::size_t>(unit)];
    master_.push_back(device.allocate(Kind::parameters, DType::float32, {n}));
    compute_.push_back(dtype == DType::float32 ? Tensor() : device.allocate(Kind::parameters, dtype, {n}));
    views_.push_back(unit_views(table, layout, unit, compute_.back().empty() ? master_.back() : compute_.back()));
  }
}

ReplicatedGradients::ReplicatedGradients(Device& device, const ParameterTable& table, const FlatLayout& layout) {
  for (int unit = 0; unit < table.units; ++unit) {
    flat_.push_back(
        device.allocate(Kind::gradients, DType::float32, {layout.unit_numel[static_cast<std::size_t>(unit)]}));
    views_.push_back(unit_views(table, layout, unit, flat_.back()));
  }
  begin_step();
}

}  // namespace onescale

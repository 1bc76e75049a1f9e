#include "parallel/units.h"

#include <algorithm>

namespace onescale {

namespace {
constexpr std::int64_t alignment = 16;  // floats in 64 bytes
}

FlatLayout::FlatLayout(const ParameterTable& table, int shard_count)
    : offset(table.parameters.size()), shards(shard_count) {
  for (std::size_t i = 0; i < table.parameters.size(); ++i) {
    const Parameter& p = table.parameters[i];
    while (unit_numel.size() <= static_cast<std::size_t>(p.unit)) {
      unit_numel.push_back(0);
      first_parameter.push_back(i);
    }
    offset[i] = unit_numel.back();
    unit_numel.back() += (p.numel() + alignment - 1) / alignment * alignment;
  }
  first_parameter.push_back(table.parameters.size());
  const std::int64_t step = alignment * shards;
  for (std::int64_t& n : unit_numel) n = (n + step - 1) / step * step;
}

Tensor Owned::part(std::int64_t from, std::int64_t to) const {
  const std::int64_t first = std::max(from, begin), last = std::min(to, begin + data.numel());
  return first < last ? data.slice(0, first - begin, last - begin) : Tensor();
}

Tensors unit_views(const ParameterTable& table, const FlatLayout& layout, int unit, Tensor flat) {
  Tensors views;
  const auto u = static_cast<std::size_t>(unit);
  for (std::size_t i = layout.first_parameter[u]; i < layout.first_parameter[u + 1]; ++i) {
    const Parameter& p = table.parameters[i];
    const Tensor t = flat.slice(0, layout.offset[i], layout.offset[i] + p.numel());
    views.push_back(p.shape.size() == 2 ? t.view({p.shape[0], p.shape[1]}) : t);
  }
  return views;
}

}  // namespace onescale

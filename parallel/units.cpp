#include "parallel/units.h"

#include "parallel/layout.h"

namespace onescale {

namespace {
constexpr std::int64_t alignment = 16;  // floats in 64 bytes
}

FlatLayout::FlatLayout(const ParameterTable& table, int shard_count)
    : offset(table.parameters.size()), shards(shard_count) {
  for (std::size_t i = 0; i < table.parameters.size(); ++i) {
    const Parameter& p = table.parameters[i];
    while (unit_numel.size() <= index(p.unit)) {
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

Tensors shards_of(Tensor flat, int shards) {
  Tensors parts;
  const std::int64_t n = flat.numel() / shards;
  for (int r = 0; r < shards; ++r) parts.push_back(flat.slice(0, r * n, (r + 1) * n));
  return parts;
}

Tensor Owned::part(const Stretch& elements) const {
  const auto place = [&](std::int64_t at) { return std::clamp(at - begin, std::int64_t{0}, data.numel()); };
  return data.slice(0, place(elements.begin), place(elements.begin + elements.numel()));
}

namespace {
Tensor shaped(Tensor t, const Parameter& p) {
  return p.shape.size() == 2 ? t.view({p.shape[0], p.shape[1]}) : t;
}
}  // namespace

Tensors unit_views(const ParameterTable& table, const FlatLayout& layout, int unit, Tensor flat, Tensor float32) {
  Tensors views;
  std::int64_t at = 0;  // in float32
  for (std::size_t i = layout.first_parameter[index(unit)]; i < layout.first_parameter[index(unit + 1)]; ++i) {
    const Parameter& p = table.parameters[i];
    if (p.float32 && !float32.empty()) {
      views.push_back(shaped(float32.slice(0, at, at + p.numel()), p));
      at += p.numel();
      continue;
    }
    const Tensor t = flat.slice(0, layout.offset[i], layout.offset[i] + p.numel());
    views.push_back(shaped(t, p));
  }
  return views;
}

std::int64_t float32_before(const ParameterTable& table, const FlatLayout& layout, int unit, std::int64_t end) {
  std::int64_t sum = 0;
  for (std::size_t i = layout.first_parameter[index(unit)]; i < layout.first_parameter[index(unit + 1)]; ++i) {
    const Parameter& p = table.parameters[i];
    if (p.float32) sum += std::clamp(end - layout.offset[i], std::int64_t{0}, p.numel());
  }
  return sum;
}

}  // namespace onescale

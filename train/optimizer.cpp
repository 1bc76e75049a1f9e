#include "train/optimizer.h"

#include <algorithm>

namespace onescale {

Optimizer::Optimizer(Device& device, const ParameterTable& table, const FlatLayout& layout, Weights& weights,
                     const OptimizerSettings& settings)
    : dev_(device), table_(table), layout_(layout), settings_(settings) {
  for (int unit = 0; settings.adamw && unit < table.units; ++unit) {
    const std::int64_t n = weights.master(unit).data.numel();
    m_.push_back(device.allocate(Kind::optimizer, DType::float32, {n}));
    v_.push_back(device.allocate(Kind::optimizer, DType::float32, {n}));
  }
}

void Optimizer::update(Weights& weights, Gradients& gradients, double lr, double gradient_scale) {
  ++updates_;
  for (int unit = 0; unit < table_.units; ++unit) {
    const auto u = static_cast<std::size_t>(unit);
    const Owned master = weights.master(unit), gradient = gradients.owned(unit);
    const Tensor compute = weights.compute(unit);
    for (std::size_t i = layout_.first_parameter[u]; i < layout_.first_parameter[u + 1]; ++i) {
      const Parameter& p = table_.parameters[i];
      const std::int64_t begin = std::max(layout_.offset[i] - master.begin, std::int64_t{0});
      const std::int64_t end = std::min(layout_.offset[i] + p.numel() - master.begin, master.data.numel());
      if (begin >= end) continue;
      const auto part = [&](Tensor t) { return t.empty() ? t : t.slice(0, begin, end); };
      const float decay = p.decay ? settings_.weight_decay : 0.0f;
      if (settings_.adamw) {
        dev_.adamw(part(master.data), part(m_[u]), part(v_[u]), part(gradient.data), part(compute),
                   {static_cast<float>(lr), settings_.beta1, settings_.beta2, settings_.eps, decay, updates_,
                    static_cast<float>(gradient_scale)});
      } else {
        dev_.sgd(part(master.data), part(gradient.data), part(compute), static_cast<float>(lr), decay,
                 static_cast<float>(gradient_scale));
      }
    }
  }
}

}  // namespace onescale

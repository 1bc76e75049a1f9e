#include "train/optimizer.h"

namespace onescale {

Optimizer::Optimizer(Device& device, const Placement& place, Weights& weights, const OptimizerSettings& settings)
    : dev_(device), place_(place), settings_(settings) {
  for (int unit = 0; settings.adamw && unit < place.units(); ++unit) {
    const Owned master = weights.master(unit);
    for (std::vector<Owned>& moment : moments_)
      moment.push_back({device.allocate(Kind::optimizer, DType::float32, {master.data.numel()}), master.begin});
  }
}

void Optimizer::update(Weights& weights, Gradients& gradients, double lr, double gradient_scale) {
  ++updates_;
  for (int unit = 0; unit < place_.units(); ++unit) {
    const auto u = static_cast<std::size_t>(unit);
    const Owned master = weights.master(unit), gradient = gradients.owned(unit);
    const Tensor compute = weights.compute(unit);
    for (std::size_t i = place_.flat.first_parameter[u]; i < place_.flat.first_parameter[u + 1]; ++i) {
      const Parameter& p = place_.table().parameters[i];
      const std::int64_t begin = place_.flat.offset[i];
      const Stretch all{unit, begin, begin + place_.slices.real(i)};
      const auto part = [&](Tensor t) { return t.empty() ? t : Owned{t, master.begin}.part(all); };
      if (part(master.data).empty()) continue;
      const float decay = p.decay ? settings_.weight_decay : 0.0f;
      if (settings_.adamw) {
        dev_.adamw(part(master.data), part(moments(0, unit).data), part(moments(1, unit).data), part(gradient.data),
                   part(compute),
                   {static_cast<float>(lr), settings_.beta1, settings_.beta2, settings_.eps, decay, updates_,
                    static_cast<float>(gradient_scale)});
      } else {
        dev_.sgd(part(master.data), part(gradient.data), part(compute), static_cast<float>(lr), decay,
                 static_cast<float>(gradient_scale));
      }
    }
    weights.updated(unit);
  }
}

}  // namespace onescale

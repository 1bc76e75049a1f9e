#include "train/model_weights.h"

#include <algorithm>

#include "model/parameters.h"

namespace onescale {

ModelWeights::ModelWeights(Device& device, Mesh& mesh, const ModelConfig& config, const ZeroSettings& zero)
    : dev_(device),
      mesh_(mesh),
      config_(config),
      place_(gpt_bigcode_table(config), mesh.layout),
      assembly_(mesh, place_),
      units_(make_weights(device, mesh, place_, zero)) {}

namespace {

// Calls fn(local, whole, count) for the runs of the elements of a parameter that lie in `owned`; local counts from the
// start of owned's data.
template <class Fn>
void for_each_owned_run(const Placement& place, std::size_t parameter, const Owned& owned, const Fn& fn) {
  const std::int64_t shift = place.flat.offset[parameter] - owned.begin;
  place.slices.for_each_run(
      parameter, std::max(-shift, std::int64_t{0}), owned.data.numel() - shift,
      [&](std::int64_t local, std::int64_t whole, std::int64_t count) { fn(local + shift, whole, count); });
}

}  // namespace

void load_owned(Device& device, const Placement& place, const Assembly::Source& keep, const FetchRange& fetch) {
  std::vector<float> values, part;
  for (std::size_t i = 0; i < place.table().parameters.size(); ++i) {
    const Owned owned = keep(place.table().parameters[i].unit);
    // The runs span one stretch of the whole tensor; it is read at once.
    std::int64_t first = -1, last = 0, begin = 0, end = 0;
    for_each_owned_run(place, i, owned, [&](std::int64_t local, std::int64_t whole, std::int64_t count) {
      if (first < 0) first = whole, begin = local;
      last = whole + count, end = local + count;
    });
    if (first < 0) continue;
    values.resize(static_cast<std::size_t>(last - first));
    fetch(i, first, last - first, values.data());
    part.resize(static_cast<std::size_t>(end - begin));
    for_each_owned_run(place, i, owned, [&](std::int64_t local, std::int64_t whole, std::int64_t count) {
      std::copy_n(values.begin() + (whole - first), count, part.begin() + (local - begin));
    });
    device.upload(owned.data.slice(0, begin, end), part.data());
  }
}

void ModelWeights::initialise(std::uint64_t seed) {
  for (std::size_t i = 0; i < table().parameters.size(); ++i) {
    const Parameter& p = table().parameters[i];
    const Owned owned = units_->master(p.unit);
    for_each_owned_run(place_, i, owned, [&](std::int64_t local, std::int64_t whole, std::int64_t count) {
      const Tensor run = owned.data.slice(0, local, local + count);
      if (p.init_stddev > 0)
        dev_.random_normal(run, seed, static_cast<std::int64_t>(i), whole, p.init_stddev);
      else
        dev_.fill(run, p.init_mean);
    });
  }
  written();
}

void ModelWeights::load(const FetchRange& fetch) {
  load_owned(dev_, place_, source(), fetch);
  written();
}

void ModelWeights::written() {
  for (int unit = 0; unit < place_.units(); ++unit) {
    if (const Tensor compute = units_->compute(unit); !compute.empty()) dev_.copy(compute, units_->master(unit).data);
    units_->updated(unit);
  }
}

}  // namespace onescale

// The ZeRO stages (Rajbhandari et al. 2020): what the ranks of the shard group hold whole and what each holds a part
// of. The owner of an element is the same in all stages.
//
//   stage  parameters                gradients  optimizer state  gradients are reduced
//   0      whole                     whole      whole            once a step
//   1      whole                     whole      part             once a step
//   2      whole                     part       part             at the end of each unit's backward
//   3      part, gathered per unit   part       part             the same
#pragma once

#include <memory>
#include <optional>

#include "parallel/mesh.h"
#include "parallel/reduction.h"
#include "parallel/tensor_slices.h"
#include "parallel/units.h"

namespace onescale {

struct ZeroSettings {
  int stage = 0;
  ReductionSettings reduction;
  DType dtype = DType::float32;  // of the copy of the parameters that the model multiplies with
};

// Where every element of the model lies: local tensors, their places in units, and the part that this rank owns.
struct Placement {
  Placement(const ParameterTable& whole, const Layout& layout)
      : layout(layout), slices(whole, layout.tp, layout.tp_rank()), flat(slices.local(), layout.shards()) {}

  const ParameterTable& table() const { return slices.local(); }
  int units() const { return table().units; }
  std::int64_t owned_begin(int unit) const { return layout.shard_rank() * flat.shard_numel(unit); }
  std::int64_t owned_end(int unit) const { return owned_begin(unit) + flat.shard_numel(unit); }
  // Local elements [from, to) of a parameter, as far as this rank owns them, or another one of the shard group.
  Stretch owned(std::size_t parameter, std::int64_t from, std::int64_t to) const {
    return owned(parameter, from, to, layout.shard_rank());
  }
  Stretch owned(std::size_t parameter, std::int64_t from, std::int64_t to, int shard_rank) const {
    const int unit = table().parameters[parameter].unit;
    const std::int64_t n = flat.shard_numel(unit), begin = shard_rank * n, offset = flat.offset[parameter];
    return {unit, std::max(offset + from, begin), std::min(offset + to, begin + n)};
  }
  // Where units are whole for a while, those of blocks take turns in two buffers, so that one of them travels while the
  // other is used; other units have a buffer each. The first unit that uses the buffer of this one:
  int buffer_of(int unit) const {
    while (unit > 2 && flat.unit_numel[index(unit)] == flat.unit_numel[index(unit - 2)]) unit -= 2;
    return unit;
  }

  Layout layout;
  TensorSlices slices;
  FlatLayout flat;
};

// One stage each; with a single shard all stages are stage 0. Collective: every rank of the mesh makes the same calls.
std::unique_ptr<Weights> make_weights(Device& device, Mesh& mesh, const Placement& place, const ZeroSettings& settings);
std::unique_ptr<Gradients> make_gradients(Device& device, Mesh& mesh, const Placement& place,
                                          const ZeroSettings& settings);

}  // namespace onescale

#include "parallel/assembly.h"

#include <algorithm>

namespace onescale {

Assembly::Assembly(Mesh& mesh, const Placement& place) : mesh_(mesh), place_(place) {
  for (int r = 0; r < place.layout.tp; ++r) slices_.emplace_back(place.slices.whole(), place.layout.tp, r);
}

Stretch Assembly::contribution(std::int64_t parameter, const Layout& layout) const {
  if (parameter < 0) return {0, 0, 0};
  const TensorSlices& slices = slices_[index(layout.tp_rank())];
  const std::size_t i = index(parameter);
  return place_.owned(i, 0, layout.tp_rank() == 0 ? slices.real(i) : slices.replicated_from(i), layout.shard_rank());
}

void Assembly::gather(const std::vector<std::int64_t>& wanted, const Source& source, float* out) const {
  const std::int64_t mine = wanted[index(mesh_.world.rank())];
  std::vector<Stretch> parts;  // of mine, by rank
  std::int64_t total = 0;
  Layout other = place_.layout;
  for (other.rank = 0; other.rank < other.world(); ++other.rank) {
    parts.push_back(contribution(mine, other));
    total += parts.back().numel();
  }
  std::vector<float> staging(index(total));
  std::vector<Tensor> send, receive;
  float* at = staging.data();
  for (int r = 0; r < mesh_.world.size(); ++r) {
    const Stretch given = contribution(wanted[index(r)], place_.layout);
    send.push_back(source(given.unit).part(given));
    receive.push_back(Tensor(at, DType::float32, {parts[index(r)].numel()}));
    at += parts[index(r)].numel();
  }
  mesh_.world.all_to_all(receive, send)->wait();
  for (int r = 0; mine >= 0 && r < mesh_.world.size(); ++r) {
    const std::int64_t begin = parts[index(r)].begin - place_.flat.offset[index(mine)];
    const float* const from = receive[index(r)].as<float>() - begin;
    slices_[index(r % place_.layout.tp)].for_each_run(index(mine), begin, begin + parts[index(r)].numel(),
                                                      [&](std::int64_t local, std::int64_t whole, std::int64_t count) {
                                                        std::copy_n(from + local, count, out + whole);
                                                      });
  }
}

}  // namespace onescale

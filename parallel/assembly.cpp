#include "parallel/assembly.h"

#include <algorithm>

namespace onescale {

Assembly::Assembly(Mesh& mesh, const Placement& place) : mesh_(mesh), place_(place) {
  for (int r = 0; r < place.layout.tp; ++r) slices_.emplace_back(place.slices.whole(), place.layout.tp, r);
}

Assembly::Interval Assembly::contribution(std::size_t parameter, const Layout& layout) const {
  const TensorSlices& slices = slices_[static_cast<std::size_t>(layout.tp_rank())];
  const std::int64_t n = place_.flat.shard_numel(place_.table().parameters[parameter].unit);
  const std::int64_t offset = place_.flat.offset[parameter], begin = layout.shard_rank() * n - offset;
  const std::int64_t limit = layout.tp_rank() == 0 ? slices.real(parameter) : slices.replicated_from(parameter);
  const std::int64_t first = std::max(begin, std::int64_t{0});
  return {first, std::max(first, std::min(begin + n, limit))};
}

void Assembly::gather(const std::vector<std::int64_t>& wanted, const Source& source, float* out) const {
  std::vector<Tensor> send, receive;
  std::vector<float> staging;
  const std::int64_t mine = wanted[static_cast<std::size_t>(mesh_.world.rank())];
  std::vector<Interval> intervals;
  std::int64_t total = 0;
  for (int r = 0; r < mesh_.world.size(); ++r) {
    Tensor piece(nullptr, DType::float32, {0});
    if (const std::int64_t p = wanted[static_cast<std::size_t>(r)]; p >= 0) {
      const auto i = static_cast<std::size_t>(p);
      const Interval part = contribution(i, place_.layout);
      const std::int64_t offset = place_.flat.offset[i];
      if (part.begin < part.end)
        piece = source(place_.table().parameters[i].unit).part(offset + part.begin, offset + part.end);
    }
    send.push_back(piece);
    Layout other = place_.layout;
    other.rank = r;
    intervals.push_back(mine >= 0 ? contribution(static_cast<std::size_t>(mine), other) : Interval{0, 0});
    total += intervals.back().end - intervals.back().begin;
  }
  staging.resize(static_cast<std::size_t>(total));
  float* at = staging.data();
  for (const Interval& interval : intervals) {
    receive.emplace_back(at, DType::float32, std::initializer_list<std::int64_t>{interval.end - interval.begin});
    at += interval.end - interval.begin;
  }
  mesh_.world.all_to_all(receive, send)->wait();
  for (int r = 0; mine >= 0 && r < mesh_.world.size(); ++r) {
    const Interval& interval = intervals[static_cast<std::size_t>(r)];
    const float* const from = receive[static_cast<std::size_t>(r)].as<float>() - interval.begin;
    slices_[static_cast<std::size_t>(r % place_.layout.tp)].for_each_run(
        static_cast<std::size_t>(mine), interval.begin, interval.end,
        [&](std::int64_t local, std::int64_t whole, std::int64_t count) {
          std::copy_n(from + local, count, out + whole);
        });
  }
}

}  // namespace onescale

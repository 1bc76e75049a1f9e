#include "parallel/replicas.h"

#include "kernels/error.h"

namespace onescale {

namespace {

// A multiplicative hash of 8 bytes at a time.
void mix(std::uint64_t& hash, Device& device, Tensor t) {
  std::vector<std::uint64_t> words(index((t.bytes() + 7) / 8));
  if (!words.empty()) device.download(words.data(), t);
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  }
}

}  // namespace

void check_replicas(Device& device, Mesh& mesh, const Placement& place, Weights& weights, int stage) {
  struct Hashes {
    std::uint64_t tp, shard;
  };
  std::vector<Hashes> mine(index(place.units()), {0, 0});
  for (std::size_t i = 0; i < place.table().parameters.size(); ++i) {
    const Stretch copies = place.owned(i, place.slices.replicated_from(i), place.slices.real(i));
    mix(mine[index(copies.unit)].tp, device, weights.master(copies.unit).part(copies));
  }
  for (int unit = 0; stage < 3 && mesh.shard->size() > 1 && unit < place.units(); ++unit) {
    for (const Tensor& whole : weights.gather(unit)) mix(mine[index(unit)].shard, device, whole);
    weights.release(unit);
  }
  std::vector<Hashes> all(mine.size() * index(mesh.world.size()));
  mesh.world.exchange(all.data(), mine.data(), static_cast<std::int64_t>(mine.size() * sizeof(Hashes)));
  for (int rank = 0; rank < mesh.world.size(); ++rank) {
    Layout other = place.layout;
    other.rank = rank;
    for (std::size_t unit = 0; unit < mine.size(); ++unit) {
      const auto at = [&](int r) { return all[index(r) * mine.size() + unit]; };
      const int first_tp = other.tp_group().front(), first_shard = other.shard_group().front();
      check(at(rank).tp == at(first_tp).tp, "unit ", unit, ": the replicated weights of rank ", rank,
            " are not those of rank ", first_tp, "; resume from a checkpoint of before");
      check(at(rank).shard == at(first_shard).shard, "unit ", unit, ": the weights of rank ", rank,
            " are not those of rank ", first_shard, "; resume from a checkpoint of before");
    }
  }
}

}  // namespace onescale

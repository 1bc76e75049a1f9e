#include "parallel/replicas.h"

#include <algorithm>
#include <cstring>

#include "kernels/error.h"

namespace onescale {

namespace {

// A multiplicative hash of 8 bytes at a time.
void mix(std::uint64_t& hash, const std::vector<char>& bytes) {
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min<std::size_t>(8, bytes.size() - i));
    hash = (hash ^ word) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  }
}

void mix(std::uint64_t& hash, Device& device, Tensor t) {
  if (t.empty()) return;
  std::vector<char> bytes(static_cast<std::size_t>(t.bytes()));
  device.download(bytes.data(), t);
  mix(hash, bytes);
}

}  // namespace

void check_replicas(Device& device, Mesh& mesh, const Placement& place, Weights& weights, int stage) {
  struct Hashes {
    std::uint64_t tp, shard;
  };
  std::vector<Hashes> mine(static_cast<std::size_t>(place.units()), {0, 0});
  for (std::size_t i = 0; i < place.table().parameters.size(); ++i) {
    const int unit = place.table().parameters[i].unit;
    Hashes& hash = mine[static_cast<std::size_t>(unit)];
    const std::int64_t offset = place.flat.offset[i];
    mix(hash.tp, device,
        weights.master(unit).part(std::max(offset + place.slices.replicated_from(i), place.owned_begin(unit)),
                                  std::min(offset + place.slices.real(i), place.owned_end(unit))));
    if (stage == 3 || mesh.shard->size() == 1) continue;
    const Tensor whole = weights.gather(unit)[i - place.flat.first_parameter[static_cast<std::size_t>(unit)]];
    mix(hash.shard, device, whole);
    weights.release(unit);
  }
  std::vector<Hashes> all(mine.size() * static_cast<std::size_t>(mesh.world.size()));
  mesh.world.exchange(all.data(), mine.data(), static_cast<std::int64_t>(mine.size() * sizeof(Hashes)));
  for (int rank = 0; rank < mesh.world.size(); ++rank) {
    Layout other = place.layout;
    other.rank = rank;
    for (std::size_t unit = 0; unit < mine.size(); ++unit) {
      const auto at = [&](int r) { return all[static_cast<std::size_t>(r) * mine.size() + unit]; };
      const int first_tp = other.tp_group().front(), first_shard = other.shard_group().front();
      check(at(rank).tp == at(first_tp).tp, "unit ", unit, ": the replicated weights of rank ", rank,
            " are not those of rank ", first_tp, "; resume from a checkpoint of before");
      check(at(rank).shard == at(first_shard).shard, "unit ", unit, ": the weights of rank ", rank,
            " are not those of rank ", first_shard, "; resume from a checkpoint of before");
    }
  }
}

}  // namespace onescale

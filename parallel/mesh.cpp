#include "parallel/mesh.h"

#include "kernels/error.h"

namespace onescale {

namespace {

std::unique_ptr<Communicator> group(Communicator& world, const std::vector<int>& members, const std::string& name) {
  return members.size() == 1 ? make_single_communicator(name) : world.split(members, name);
}

}  // namespace

Mesh::Mesh(Communicator& all, const Layout& l)
    : layout(l),
      world(all),
      tp(group(all, l.tp_group(), "tp")),
      sp(group(all, l.sp_group(), "sp")),
      dp(group(all, l.dp_group(), "dp")),
      shard(group(all, l.shard_group(), "shard")) {
  check(all.size() == l.world() && all.rank() == l.rank, "the layout ", l.text(), " of rank ", l.rank,
        " is not that of rank ", all.rank(), " among ", all.size());
}

Mesh::Mesh(std::unique_ptr<Communicator> all, const Layout& l) : Mesh(*all, l) {
  kept_ = std::move(all);
}

std::unique_ptr<Mesh> Mesh::single() {
  return std::make_unique<Mesh>(make_single_communicator("world"), Layout{});
}

std::unique_ptr<Mesh> Mesh::recording(const Layout& layout) {
  return std::make_unique<Mesh>(make_recording_communicator("world", layout.rank, layout.world()), layout);
}

}  // namespace onescale

// The groups that one rank communicates in.
#pragma once

#include <utility>

#include "kernels/error.h"
#include "parallel/communicator.h"
#include "parallel/layout.h"

namespace onescale {

struct Mesh {
  // Splits `all`, which must outlive it, into the layout's groups; every rank of it calls this.
  Mesh(Communicator& all, const Layout& layout)
      : layout(layout),
        world(all),
        tp(all.split(layout.tp_group(), "tp")),
        sp(all.split(layout.sp_group(), "sp")),
        dp(all.split(layout.dp_group(), "dp")),
        shard(all.split(layout.shard_group(), "shard")) {
    check(all.size() == layout.world() && all.rank() == layout.rank, "the layout ", layout.text(), " of rank ",
          layout.rank, " is not that of rank ", all.rank(), " among ", all.size());
  }
  Mesh(std::unique_ptr<Communicator> all, const Layout& layout) : Mesh(*all, layout) { kept_ = std::move(all); }
  // Of one rank of a layout that is only planned: it moves nothing and counts.
  static std::unique_ptr<Mesh> recording(const Layout& layout) {
    return std::make_unique<Mesh>(make_recording_communicator("world", layout.rank, layout.world()), layout);
  }
  static std::unique_ptr<Mesh> single() { return recording({}); }

 private:
  std::unique_ptr<Communicator> kept_;

 public:
  Layout layout;
  Communicator& world;
  std::unique_ptr<Communicator> tp, sp, dp, shard;

  // Lets the transfers of all groups go on.
  void progress() { world.progress(); }
  std::vector<Communicator*> groups() const { return {&world, tp.get(), sp.get(), dp.get(), shard.get()}; }
};

}  // namespace onescale

// The groups that one rank communicates in.
#pragma once

#include "parallel/communicator.h"
#include "parallel/layout.h"

namespace onescale {

struct Mesh {
  // Splits `world`, which must outlive it, into the layout's groups; every rank of it calls this.
  Mesh(Communicator& world, const Layout& layout);
  Mesh(std::unique_ptr<Communicator> world, const Layout& layout);  // which it keeps
  static std::unique_ptr<Mesh> single();
  // Of one rank of a layout that is only planned: it moves nothing and counts.
  static std::unique_ptr<Mesh> recording(const Layout& layout);

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

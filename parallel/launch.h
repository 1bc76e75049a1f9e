// Which rank this process is, found from what its launcher left in the environment, and the job that the ranks form.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace onescale {

class MpiJob;

struct Launch {
  int rank = 0, world = 1;  // world 0: known to MPI only
  std::string source;       // "Open MPI (OMPI_COMM_WORLD_RANK)", "" for a process started by hand
  bool mpi = false;         // the launcher can connect MPI's ranks
  std::string problem;      // why this process cannot be a rank, with the fix; empty where it can
};

// From Open MPI or PMIx, then the Slurm step, PMI, and torchrun's variables. `variable` is std::getenv or a test's.
Launch find_launch(const std::function<const char*(const char*)>& variable);

// All ranks of a program. As constructed, and without a launcher, one process, which never starts MPI.
class World {
 public:
  World();
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Runs a program and returns its exit code: what `body` returns, once every rank is there (a launcher may kill the
  // others when the first one leaves with 75), or 2 for a UsageError and 1 for another exception. The exception's
  // sentence goes to standard error once, from the lowest rank that failed, and ends all ranks.
  int run(const std::function<int()>& body);

  // Joins the other ranks; called first in `body`. Throws UsageError where sources disagree, or where MPI does not
  // connect the ranks that the launcher started: they would be so many single processes.
  // largest_message: in bytes, of what MPI is given at once.
  void open(std::int64_t largest_message = std::int64_t{1} << 30);

  // Called instead by a program that is one process: throws UsageError where a launcher has started several.
  void stay_alone(const std::string& program);

  const Launch& launch() const { return launch_; }
  int rank() const { return launch_.rank; }
  Communicator& communicator();
  // Seconds after which a rank that waits ends the job, and the step that it then names.
  void set_timeout(double seconds);
  void set_step(std::int64_t step);
  // Throws UsageError on every rank unless `text` is the same on all; it names `what` and the first line that differs.
  void check_same(const std::string& what, const std::string& text);

 private:
  int fail(int code, const std::string& sentence);

  Launch launch_;
  std::unique_ptr<Communicator> single_;
  std::unique_ptr<MpiJob> mpi_;
};

}  // namespace onescale

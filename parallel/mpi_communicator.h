// A job's ranks over MPI, for tensors in host memory. Only this file's source includes mpi.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace onescale {

// One object a process, from the thread that started it. Its groups must not outlive it, nor transfers their group.
class MpiJob {
 public:
  // Starts MPI. A message holds at most `largest` bytes: longer pieces, of any 64-bit size, travel as several.
  explicit MpiJob(std::int64_t largest);
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  // All ranks, as group "world". Every wait of this group and of those split from it that lasts longer than the timeout
  // throws an Error on the lowest rank that waits, naming operation, group, step and the ranks that did not come.
  Communicator& communicator() { return *communicator_; }
  void set_timeout(double seconds);
  // The step that such a sentence names.
  void set_step(std::int64_t step);

  // The end of a job that went well: waits for all ranks, then ends MPI.
  void finish();
  // The end after an error: the sentence goes to standard error from the lowest rank that failed, once, and all ranks
  // end. Returns, with MPI ended, only where all of them failed alike and can leave with `code` by themselves.
  void fail(int code, const std::string& sentence);

  struct State;

 private:
  std::unique_ptr<State> state_;
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace onescale

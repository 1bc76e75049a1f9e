// The ranks of a job over MPI: how they start, wait and end together. Only this file includes mpi.h, and only
// mpi_job.cpp, mpi_communicator.cpp and launch.cpp include this file.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include "parallel/communicator.h"

namespace onescale {

void check_mpi(int code, const char* call);
#define CHECK_MPI(call) check_mpi(call, #call)

class MpiOperation;

// One object a process, from the thread that started it. Its groups must not outlive it, nor transfers their group.
class MpiJob {
 public:
  // Starts MPI. A message holds at most `largest` bytes, a multiple of 8: longer pieces, of any 64-bit size, travel as
  // several.
  explicit MpiJob(std::int64_t largest);
  const std::int64_t largest;
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  // All ranks, as group "world", for host memory. Every wait of this group and of those split from it that lasts longer
  // than the timeout throws an Error on the lowest rank that waits, naming operation, group, step and the ranks that
  // did not come.
  Communicator& communicator() { return *communicator_; }
  double timeout = 600;    // in seconds
  std::int64_t step = -1;  // that such a sentence names

  // The end of a job that went well: waits for all ranks, then ends MPI.
  void finish();
  // The end after an error: the sentence goes to standard error from the lowest rank that failed, once, and all ranks
  // end. Returns, with MPI ended, only where all of them failed alike and can leave with `code` by themselves.
  void fail(int code, const std::string& sentence);

  // A transfer of two phases starts its second here, so a rank that waits for one transfer lets all go on.
  void progress();
  void wait(const MpiOperation& operation);

 private:
  friend class MpiOperation;

  // What one rank tells all others, beside the collectives.
  enum Kind : std::int32_t { waits, fails, speaks };
  struct Notice {
    Kind kind;
    std::int32_t code = 0;
    char where[96] = {};
  };
  void tell(const Notice& notice);
  void listen();
  [[noreturn]] void give_up(const MpiOperation& operation);
  // "barrier in group world at step 7"
  std::string where(const MpiOperation& operation, const char* in) const;

  std::vector<MpiOperation*> active_;
  bool abandoned_ = false;  // a transfer was given up: MPI may still write to memory that is gone
  MPI_Comm notices_ = MPI_COMM_NULL;
  std::deque<Notice> told_;         // buffers of messages under way
  std::map<int, Notice> heard_[3];  // by kind and rank
  std::unique_ptr<Communicator> communicator_;
};

// A started collective: requests, and what is to be done and started once they have ended.
class MpiOperation final : public Transfer {
 public:
  MpiOperation(MpiJob& job, const char* name, const std::string& group, const std::vector<int>& members)
      : name(name), group(group), members(members), job_(job) {
    job_.active_.push_back(this);
  }
  ~MpiOperation() override {
    if (!done) job_.abandoned_ = true;
    std::erase(job_.active_, this);
  }
  MpiOperation(const MpiOperation&) = delete;
  MpiOperation& operator=(const MpiOperation&) = delete;

  MPI_Request* add() { return &requests.emplace_back(MPI_REQUEST_NULL); }
  void wait() override { job_.wait(*this); }

  const std::string name, group;
  const std::vector<int>& members;  // of the job
  std::vector<MPI_Request> requests;
  std::function<void()> next;
  bool done = false;

 private:
  MpiJob& job_;
};

// members: ranks of the job. The MPI communicator is never freed, which would be a collective call.
std::unique_ptr<Communicator> make_mpi_communicator(MpiJob& job, MPI_Comm comm, const std::string& name,
                                                    const std::vector<int>& members);

}  // namespace onescale

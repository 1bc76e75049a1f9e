#include "parallel/mpi_job.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <thread>
#include <utility>

#include "kernels/error.h"

namespace onescale {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

[[noreturn]] void end_all(int code) {
  usleep(100'000);  // standard error travels by another way than MPI's own words, and comes first
  MPI_Abort(MPI_COMM_WORLD, code);
  _exit(code);
}

void say(const std::string& sentence) {
  std::fprintf(stderr, "onescale: %s\n", shortened(sentence).c_str());
}

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(str("MPI fails in ", call, ": ", text));
}

void MpiJob::progress() {
  for (MpiOperation* operation : active_) {
    while (!operation->done) {
      std::vector<MPI_Request>& requests = operation->requests;
      int ended = 0;
      CHECK_MPI(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &ended, MPI_STATUSES_IGNORE));
      if (!ended) break;
      requests.clear();
      operation->done = !operation->next;
      if (operation->next) std::exchange(operation->next, {})();
    }
  }
}

void MpiJob::wait(const MpiOperation& operation) {
  const Clock::time_point begin = Clock::now();
  for (std::int64_t turn = 0;; ++turn) {
    progress();
    if (operation.done) return;
    if (turn < 100) continue;
    sched_yield();  // ranks may share cores
    if (turn % 32 != 0) continue;
    listen();
    if (!heard_[waits].empty() || seconds_since(begin) > timeout) give_up(operation);
  }
}

std::string MpiJob::where(const MpiOperation& operation, const char* in) const {
  return str(operation.name, in, "group ", operation.group,
             step < 0 ? " before the first step" : str(" at step ", step));
}

void MpiJob::tell(const Notice& notice) {
  const Notice& kept = told_.emplace_back(notice);
  for (int r = 0; r < communicator_->size(); ++r) {
    if (r == communicator_->rank()) continue;
    MPI_Request request;
    CHECK_MPI(MPI_Isend(&kept, sizeof kept, MPI_BYTE, r, 0, notices_, &request));
    CHECK_MPI(MPI_Request_free(&request));
  }
}

void MpiJob::listen() {
  for (;;) {
    int here = 0;
    MPI_Status status;
    CHECK_MPI(MPI_Iprobe(MPI_ANY_SOURCE, 0, notices_, &here, &status));
    if (!here) return;
    Notice notice{waits};
    CHECK_MPI(MPI_Recv(&notice, sizeof notice, MPI_BYTE, status.MPI_SOURCE, 0, notices_, MPI_STATUS_IGNORE));
    heard_[notice.kind][status.MPI_SOURCE] = notice;
  }
}

// A rank that waits answers another's notice with its own: who is silent after two seconds does not wait.
void MpiJob::give_up(const MpiOperation& operation) {
  std::map<int, Notice>& waiting = heard_[waits];
  const int size = communicator_->size(), rank = communicator_->rank();
  Notice mine{waits};
  where(operation, " of ").copy(mine.where, sizeof mine.where - 1);
  tell(mine);
  waiting[rank] = mine;
  const Clock::time_point begin = Clock::now();
  while (static_cast<int>(waiting.size()) < size && seconds_since(begin) < 2) {
    listen();
    usleep(1000);
  }
  // The lowest one's sentence ends the job; the launcher's SIGTERM, which a handler may take, wakes nobody before.
  if (!heard_[speaks].empty() || waiting.begin()->first != rank) std::this_thread::sleep_for(std::chrono::seconds(6));
  const auto silent_of = [&](std::vector<int> ranks) {
    std::erase_if(ranks, [&](int r) { return waiting.contains(r); });
    return ranks;
  };
  std::vector<int> everyone(index(size)), silent = silent_of(operation.members);
  std::iota(everyone.begin(), everyone.end(), 0);
  if (silent.empty()) silent = silent_of(everyone);
  std::string list, reason;
  for (const int r : silent) list += str(list.empty() ? " " : ", ", r);
  if (silent.empty()) {
    for (const auto& [r, notice] : waiting) list += str(list.empty() ? " " : ", ", "rank ", r, " in ", notice.where);
    reason = "every rank waits, but not all for the same:" + list;
  } else {
    reason = str(silent.size() == 1 ? "rank" : "ranks", list,
                 " did not come; see what holds up there, or give a larger comm_timeout");
  }
  tell({speaks});  // to one that was stopped and goes on
  throw Error(str(where(operation, " in "), " waits longer than comm_timeout, ", timeout, " s: ", reason));
}

MpiJob::MpiJob(std::int64_t largest) : largest(largest) {
  int provided = 0, size = 1;
  CHECK_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
  CHECK_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  CHECK_MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
  CHECK_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &notices_));
  std::vector<int> members(index(size));
  std::iota(members.begin(), members.end(), 0);
  MPI_Comm comm = MPI_COMM_NULL;
  CHECK_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
  communicator_ = make_mpi_communicator(*this, comm, "world", members);
}

void MpiJob::finish() {
  communicator_->barrier();
  CHECK_MPI(MPI_Finalize());
}

// A rank waits a little for lower ones that fail too, longer where all are likely to: a wrong setting.
void MpiJob::fail(int code, const std::string& sentence) {
  if (abandoned_) {  // any further call to MPI could write into what is gone
    say(sentence);
    end_all(code);
  }
  listen();
  Notice mine{fails};
  mine.code = code;
  const auto spoken = [&] { return !heard_[speaks].empty(); };
  if (!spoken()) tell(mine);
  std::map<int, Notice>& failing = heard_[fails];
  failing[communicator_->rank()] = mine;
  const auto all_alike = [&] {
    return static_cast<int>(failing.size()) == communicator_->size() &&
           std::all_of(failing.begin(), failing.end(), [&](const auto& f) { return f.second.code == code; });
  };
  const double patience = code == 2 ? 3 : 0.5;
  for (const Clock::time_point begin = Clock::now(); !all_alike() && !spoken() && seconds_since(begin) < patience;) {
    usleep(1000);
    listen();
  }
  const bool alike = all_alike(), first = !spoken() && failing.begin()->first == communicator_->rank();
  if (first && !alike) tell({speaks});
  if (first) say(sentence);
  if (alike) {
    timeout = 5;
    try {
      finish();
      return;
    } catch (const Error&) {
      end_all(code);
    }
  }
  if (!first) std::this_thread::sleep_for(std::chrono::seconds(8));  // the one that speaks ends the job
  end_all(code);
}

}  // namespace onescale

#include "parallel/mpi_communicator.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <thread>
#include <utility>

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include "kernels/cpu/vec.h"
#include "kernels/error.h"

namespace onescale {

namespace {

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(str("MPI fails in ", call, ": ", text));
}
#define CHECK(call) check_mpi(call, #call)

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// What one rank tells all others, beside the collectives.
enum Kind : std::int32_t { waits, fails, speaks };
struct Notice {
  Kind kind;
  std::int32_t code = 0;
  std::int64_t step = 0;
  char operation[24] = {}, group[24] = {};
};

std::string step_text(std::int64_t step) {
  return step < 0 ? " before the first step" : str(" at step ", step);
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += str(i == 0 ? "" : ", ", ranks[i]);
  return text;
}

struct Piece {
  void* data;
  std::int64_t bytes;
};

std::vector<Piece> pieces_of(const std::vector<Tensor>& tensors) {
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (const Tensor& t : tensors) pieces.push_back({t.data, t.bytes()});
  return pieces;
}

class Operation;

}  // namespace

struct MpiJob::State {
  int rank = 0, size = 1;
  std::int64_t largest, step = -1;
  double timeout = 600;
  std::vector<Operation*> active;
  bool abandoned = false;  // a transfer was given up: MPI may still write to memory that is gone

  MPI_Comm notices = MPI_COMM_NULL;
  std::deque<Notice> told;  // buffers of messages under way
  std::map<int, Notice> waiting, failing;
  bool spoken = false;

  explicit State(std::int64_t largest_message) : largest(largest_message) {}
  void progress();
  void wait(Operation& operation);
  void tell(const Notice& notice);
  void listen();
  [[noreturn]] void give_up(const Operation& operation);
};

namespace {

using Job = MpiJob::State;

// A started collective: requests, and what is to be done and started once they have ended.
class Operation final : public Transfer {
 public:
  Operation(Job& job, const char* name, const std::string& group, const std::vector<int>& members, int tag)
      : name(name), group(group), members(members), tag(tag), job_(job) {
    job_.active.push_back(this);
  }
  ~Operation() override {
    if (!done) job_.abandoned = true;
    std::erase(job_.active, this);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void poll() {
    while (!done) {
      int ended = 0;
      CHECK(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &ended, MPI_STATUSES_IGNORE));
      if (!ended) return;
      requests.clear();
      if (next) {
        std::exchange(next, {})();
      } else {
        done = true;
      }
    }
  }
  void wait() override { job_.wait(*this); }

  MPI_Request* add() { return &requests.emplace_back(MPI_REQUEST_NULL); }

  const std::string name, group;
  const std::vector<int>& members;
  const int tag;
  std::vector<MPI_Request> requests;
  std::function<void()> next;
  std::vector<bf16> received;
  bool done = false;

 private:
  Job& job_;
};

Notice where(Kind kind, std::int64_t step, const Operation& operation) {
  Notice notice{kind};
  notice.step = step;
  operation.name.copy(notice.operation, sizeof notice.operation - 1);
  operation.group.copy(notice.group, sizeof notice.group - 1);
  return notice;
}

}  // namespace

// A transfer of two phases starts its second here, so a rank that waits for one transfer lets all go on.
void MpiJob::State::progress() {
  for (Operation* operation : active) operation->poll();
}

void MpiJob::State::wait(Operation& operation) {
  const Clock::time_point begin = Clock::now();
  for (int turn = 0;; turn = (turn + 1) % (1 << 20)) {
    progress();
    if (operation.done) return;
    if (turn < 100) continue;
    sched_yield();  // ranks may share cores
    if (turn % 32 != 0) continue;
    listen();
    if (!waiting.empty() || seconds_since(begin) > timeout) give_up(operation);
  }
}

void MpiJob::State::tell(const Notice& notice) {
  const Notice& kept = told.emplace_back(notice);
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    MPI_Request request;
    CHECK(MPI_Isend(&kept, sizeof kept, MPI_BYTE, r, 0, notices, &request));
    CHECK(MPI_Request_free(&request));
  }
}

void MpiJob::State::listen() {
  for (;;) {
    int here = 0;
    MPI_Status status;
    CHECK(MPI_Iprobe(MPI_ANY_SOURCE, 0, notices, &here, &status));
    if (!here) return;
    Notice notice{waits};
    CHECK(MPI_Recv(&notice, sizeof notice, MPI_BYTE, status.MPI_SOURCE, 0, notices, MPI_STATUS_IGNORE));
    if (notice.kind == waits) waiting[status.MPI_SOURCE] = notice;
    if (notice.kind == fails) failing[status.MPI_SOURCE] = notice;
    if (notice.kind == speaks) spoken = true;
  }
}

// A rank that waits answers another's notice with its own: who is silent after two seconds does not wait.
void MpiJob::State::give_up(const Operation& operation) {
  const Notice mine = where(waits, step, operation);
  tell(mine);
  waiting[rank] = mine;
  const Clock::time_point begin = Clock::now();
  while (static_cast<int>(waiting.size()) < size && seconds_since(begin) < 2) {
    listen();
    usleep(1000);
  }
  // The lowest one's sentence ends the job; the launcher's SIGTERM, which a handler may take, wakes nobody before.
  if (spoken || waiting.begin()->first != rank) std::this_thread::sleep_for(std::chrono::seconds(6));
  std::vector<int> silent;
  for (const int r : operation.members) {
    if (!waiting.contains(r)) silent.push_back(r);
  }
  for (int r = 0; r < size && silent.empty(); ++r) {
    if (!waiting.contains(r)) silent.push_back(r);
  }
  std::string reason;
  if (silent.empty()) {
    reason = "every rank waits, but not all for the same:";
    for (const auto& [r, notice] : waiting) {
      reason += str(r == waiting.begin()->first ? "" : ",", " rank ", r, " in ", notice.operation, " of group ",
                    notice.group, step_text(notice.step));
    }
  } else {
    reason = rank_list(silent) + " did not come; see what holds up there, or give a larger comm_timeout";
  }
  tell({speaks});  // to one that was stopped and goes on
  throw Error(str(operation.name, " in group ", operation.group, step_text(step), " waits longer than comm_timeout, ",
                  timeout, " s: ", reason));
}

namespace {

class MpiCommunicator final : public Communicator {
 public:
  // members: ranks of the job. The MPI communicator is never freed, which would be a collective call.
  MpiCommunicator(Job& job, MPI_Comm comm, const std::string& name, int rank, std::vector<int> members)
      : Communicator(name, rank, static_cast<int>(members.size())),
        job_(job),
        comm_(comm),
        members_(std::move(members)) {
    CHECK(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  }

  std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::string& name) override;
  void progress() override { job_.progress(); }

 private:
  std::unique_ptr<Transfer> start_all_reduce(Tensor x) override;
  std::unique_ptr<Transfer> start_reduce_scatter(Tensor out, std::vector<Tensor> in) override;
  std::unique_ptr<Transfer> start_all_gather(std::vector<Tensor> out, Tensor in) override;
  std::unique_ptr<Transfer> start_all_to_all(std::vector<Tensor> out, std::vector<Tensor> in) override;
  std::unique_ptr<Transfer> start_broadcast(Tensor x, int root) override;
  void do_barrier() override;
  void do_exchange(void* all, const void* mine, std::int64_t bytes) override;

  std::unique_ptr<Operation> start(const char* name);
  // in[r] to rank r, out[r] from rank r.
  void send_receive(Operation& operation, int tag, const std::vector<Piece>& out, const std::vector<Piece>& in);
  void send(Operation& operation, int tag, Piece piece, int to);
  void receive(Operation& operation, int tag, Piece piece, int from);
  // out = the sum of all ranks' in[rank()], added in rank order in float32; then `next`.
  void sum_bfloat16(Operation& operation, Tensor out, const std::vector<Tensor>& in, std::function<void()> next);

  // f(begin, count) for cuts of at most `most` of n.
  template <class F>
  static void each_cut(std::int64_t n, std::int64_t most, F f) {
    for (std::int64_t begin = 0; begin < n; begin += most) f(begin, static_cast<int>(std::min(most, n - begin)));
  }
  std::int64_t most_elements() const { return std::max<std::int64_t>(1, job_.largest / 8); }

  Job& job_;
  MPI_Comm comm_;
  std::vector<int> members_;
  int next_tag_ = 0;
};

MPI_Datatype number_type(DType dtype, const char* operation) {
  check(dtype == DType::float32 || dtype == DType::float64 || dtype == DType::int64, operation, " adds no ",
        name_of(dtype));
  return dtype == DType::float32 ? MPI_FLOAT : dtype == DType::float64 ? MPI_DOUBLE : MPI_INT64_T;
}

constexpr int split_tag = 32766, most_tags = 32766;  // MPI promises tags up to 32767

// Transfers under way in a group differ in their tags; the second phase of one has the next tag.
std::unique_ptr<Operation> MpiCommunicator::start(const char* name) {
  next_tag_ = (next_tag_ + 2) % most_tags;
  return std::make_unique<Operation>(job_, name, this->name(), members_, next_tag_);
}

void MpiCommunicator::send(Operation& operation, int tag, Piece piece, int to) {
  each_cut(piece.bytes, job_.largest, [&](std::int64_t begin, int bytes) {
    CHECK(MPI_Isend(static_cast<char*>(piece.data) + begin, bytes, MPI_BYTE, to, tag, comm_, operation.add()));
  });
}

void MpiCommunicator::receive(Operation& operation, int tag, Piece piece, int from) {
  each_cut(piece.bytes, job_.largest, [&](std::int64_t begin, int bytes) {
    CHECK(MPI_Irecv(static_cast<char*>(piece.data) + begin, bytes, MPI_BYTE, from, tag, comm_, operation.add()));
  });
}

void MpiCommunicator::send_receive(Operation& operation, int tag, const std::vector<Piece>& out,
                                   const std::vector<Piece>& in) {
  const auto at = [](int r) { return static_cast<std::size_t>(r); };
  for (int k = 1; k < size(); ++k) {
    const int from = (rank() + size() - k) % size();
    receive(operation, tag, out[at(from)], from);
  }
  for (int k = 1; k < size(); ++k) {
    const int to = (rank() + k) % size();
    send(operation, tag, in[at(to)], to);
  }
  const Piece mine = in[at(rank())];
  if (out[at(rank())].data != mine.data && mine.bytes > 0) {
    std::memcpy(out[at(rank())].data, mine.data, static_cast<std::size_t>(mine.bytes));
  }
}

void MpiCommunicator::sum_bfloat16(Operation& operation, Tensor out, const std::vector<Tensor>& in,
                                   std::function<void()> next) {
  const std::int64_t n = out.numel();
  operation.received.resize(static_cast<std::size_t>(n * (size() - 1)));
  std::vector<Piece> from;
  bf16* place = operation.received.data();
  for (int r = 0; r < size(); ++r) {
    from.push_back({r == rank() ? in[static_cast<std::size_t>(r)].data : place, out.bytes()});
    if (r != rank()) place += n;
  }
  send_receive(operation, operation.tag, from, pieces_of(in));
  operation.next = [&operation, from, out, n, next = std::move(next)] {
    constexpr std::int64_t block = 1024;
    float sum[block];
    for (std::int64_t begin = 0; begin < n; begin += block) {
      const std::int64_t count = std::min(block, n - begin);
      std::fill_n(sum, count, 0.0f);
      for (const Piece& piece : from) {
        const bf16* x = static_cast<const bf16*>(piece.data) + begin;
        for (std::int64_t i = 0; i < count; ++i) sum[i] += cpu::to_float(x[i]);
      }
      for (std::int64_t i = 0; i < count; ++i) cpu::put(out.as<bf16>()[begin + i], sum[i]);
    }
    operation.received = {};
    if (next) next();
  };
}

std::unique_ptr<Transfer> MpiCommunicator::start_all_reduce(Tensor x) {
  std::unique_ptr<Operation> operation = start("all_reduce");
  const std::int64_t n = x.numel();
  if (x.dtype == DType::bfloat16) {
    const Tensor flat(x.data, x.dtype, {n});
    std::vector<Tensor> parts;
    parts.reserve(members_.size());
    for (int r = 0; r < size(); ++r) parts.push_back(flat.slice(0, n * r / size(), n * (r + 1) / size()));
    const Tensor mine = parts[static_cast<std::size_t>(rank())];
    sum_bfloat16(*operation, mine, parts, [this, parts, mine, &op = *operation] {
      send_receive(op, op.tag + 1, pieces_of(parts), std::vector(parts.size(), Piece{mine.data, mine.bytes()}));
    });
    return operation;
  }
  const MPI_Datatype type = number_type(x.dtype, "all_reduce");
  each_cut(n, most_elements(), [&](std::int64_t begin, int count) {
    CHECK(MPI_Iallreduce(MPI_IN_PLACE, static_cast<char*>(x.data) + begin * size_of(x.dtype), count, type, MPI_SUM,
                         comm_, operation->add()));
  });
  return operation;
}

std::unique_ptr<Transfer> MpiCommunicator::start_reduce_scatter(Tensor out, std::vector<Tensor> in) {
  std::unique_ptr<Operation> operation = start("reduce_scatter");
  if (out.dtype == DType::bfloat16) {
    sum_bfloat16(*operation, out, in, {});
    return operation;
  }
  const MPI_Datatype type = number_type(out.dtype, "reduce_scatter");
  for (int owner = 0; owner < size(); ++owner) {
    const Tensor piece = in[static_cast<std::size_t>(owner)];
    const bool here = owner == rank();
    each_cut(piece.numel(), most_elements(), [&](std::int64_t begin, int count) {
      const std::int64_t offset = begin * size_of(out.dtype);
      const void* from = here && out.data == piece.data ? MPI_IN_PLACE : static_cast<char*>(piece.data) + offset;
      void* to = here ? static_cast<char*>(out.data) + offset : nullptr;
      CHECK(MPI_Ireduce(from, to, count, type, MPI_SUM, owner, comm_, operation->add()));
    });
  }
  return operation;
}

std::unique_ptr<Transfer> MpiCommunicator::start_all_gather(std::vector<Tensor> out, Tensor in) {
  std::unique_ptr<Operation> operation = start("all_gather");
  send_receive(*operation, operation->tag, pieces_of(out), std::vector(out.size(), Piece{in.data, in.bytes()}));
  return operation;
}

std::unique_ptr<Transfer> MpiCommunicator::start_all_to_all(std::vector<Tensor> out, std::vector<Tensor> in) {
  std::unique_ptr<Operation> operation = start("all_to_all");
  send_receive(*operation, operation->tag, pieces_of(out), pieces_of(in));
  return operation;
}

std::unique_ptr<Transfer> MpiCommunicator::start_broadcast(Tensor x, int root) {
  std::unique_ptr<Operation> operation = start("broadcast");
  each_cut(x.bytes(), job_.largest, [&](std::int64_t begin, int bytes) {
    CHECK(MPI_Ibcast(static_cast<char*>(x.data) + begin, bytes, MPI_BYTE, root, comm_, operation->add()));
  });
  return operation;
}

void MpiCommunicator::do_barrier() {
  const std::unique_ptr<Operation> operation = start("barrier");
  CHECK(MPI_Ibarrier(comm_, operation->add()));
  operation->wait();
}

void MpiCommunicator::do_exchange(void* all, const void* mine, std::int64_t bytes) {
  const std::unique_ptr<Operation> operation = start("exchange");
  std::vector<Piece> out;
  out.reserve(members_.size());
  for (int r = 0; r < size(); ++r) out.push_back({static_cast<char*>(all) + r * bytes, bytes});
  std::vector<char> sent(static_cast<const char*>(mine), static_cast<const char*>(mine) + bytes);
  send_receive(*operation, operation->tag, out, std::vector(out.size(), Piece{sent.data(), bytes}));
  operation->wait();
}

std::unique_ptr<Communicator> MpiCommunicator::split(const std::vector<int>& members, const std::string& name) {
  const auto me = std::find(members.begin(), members.end(), rank());
  check(me != members.end(), "group ", name, ": rank ", rank(), " is none of its members");
  if (members.size() == 1) return make_single_communicator(name);
  std::vector<int> ranks;
  ranks.reserve(members.size());
  for (const int r : members) ranks.push_back(members_[static_cast<std::size_t>(r)]);

  // MPI_Comm_create_group waits without an end, so the members meet before.
  Operation meet(job_, "split", name, ranks, split_tag);
  char out = 0;
  std::vector<char> in(members.size());
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank()) continue;
    receive(meet, split_tag, {&in[i], 1}, members[i]);
    send(meet, split_tag, {&out, 1}, members[i]);
  }
  meet.wait();

  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  CHECK(MPI_Comm_group(comm_, &all));
  CHECK(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some));
  CHECK(MPI_Comm_create_group(comm_, some, split_tag, &comm));
  CHECK(MPI_Group_free(&some));
  CHECK(MPI_Group_free(&all));
  return std::make_unique<MpiCommunicator>(job_, comm, name, static_cast<int>(me - members.begin()), ranks);
}

[[noreturn]] void end_all(int code) {
  usleep(100'000);  // standard error travels by another way than MPI's own words, and comes first
  MPI_Abort(MPI_COMM_WORLD, code);
  _exit(code);
}

void say(const std::string& sentence) {
  std::fprintf(stderr, "onescale: %s\n", sentence.c_str());
}

}  // namespace

MpiJob::MpiJob(std::int64_t largest) : state_(std::make_unique<State>(largest)) {
  int provided = 0;
  CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
  CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &state_->rank));
  CHECK(MPI_Comm_size(MPI_COMM_WORLD, &state_->size));
  CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &state_->notices));
  std::vector<int> members(static_cast<std::size_t>(state_->size));
  std::iota(members.begin(), members.end(), 0);
  MPI_Comm comm = MPI_COMM_NULL;
  CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
  communicator_ = std::make_unique<MpiCommunicator>(*state_, comm, "world", state_->rank, members);
}

MpiJob::~MpiJob() = default;

void MpiJob::set_timeout(double seconds) {
  state_->timeout = seconds;
}

void MpiJob::set_step(std::int64_t step) {
  state_->step = step;
}

void MpiJob::finish() {
  communicator_->barrier();
  CHECK(MPI_Finalize());
}

// A rank waits a little for lower ones that fail too, longer where all are likely to: a wrong setting.
void MpiJob::fail(int code, const std::string& sentence) {
  State& job = *state_;
  if (job.abandoned) {  // any further call to MPI could write into what is gone
    say(sentence);
    end_all(code);
  }
  job.listen();
  Notice mine{fails};
  mine.code = code;
  if (!job.spoken) job.tell(mine);
  job.failing[job.rank] = mine;
  const auto all_alike = [&] {
    return static_cast<int>(job.failing.size()) == job.size &&
           std::all_of(job.failing.begin(), job.failing.end(), [&](const auto& f) { return f.second.code == code; });
  };
  const double patience = code == 2 ? 3 : 0.5;
  for (const Clock::time_point begin = Clock::now(); !all_alike() && !job.spoken && seconds_since(begin) < patience;) {
    usleep(1000);
    job.listen();
  }
  const bool alike = all_alike(), first = !job.spoken && job.failing.begin()->first == job.rank;
  if (first && !alike) job.tell({speaks});
  if (first) say(sentence);
  if (alike) {
    job.timeout = 5;
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

// A group of a job's ranks, as an MPI communicator.
#include <algorithm>
#include <utility>

#include "kernels/bfloat16.h"
#include "kernels/error.h"
#include "parallel/mpi_job.h"

namespace onescale {

namespace {

constexpr int split_tag = 32766, most_tags = 32766;  // MPI promises tags up to 32767

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MpiJob& job, MPI_Comm comm, const std::string& name, int rank, const std::vector<int>& members)
      : Communicator(name, rank, static_cast<int>(members.size())), job_(job), comm_(comm), members_(members) {}

  std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::string& name) override {
    const auto me = std::find(members.begin(), members.end(), rank());
    check(me != members.end(), "group ", name, ": rank ", rank(), " is none of its members");
    if (members.size() == 1) return make_single_communicator(name);
    std::vector<int> ranks;
    for (const int r : members) ranks.push_back(members_[index(r)]);

    // MPI_Comm_create_group waits without an end, so the members meet before: each sends each a byte.
    MpiOperation meet(job_, "split", name, ranks);
    std::vector<char> bytes(index(size() + 1));
    std::vector<Piece> out(index(size()), Piece(nullptr, 0)), in = out;
    for (const int r : members) {
      in[index(r)] = {&bytes.back(), 1};
      out[index(r)] = {&bytes[index(r)], 1};
    }
    send_receive(meet, split_tag, out, in);
    meet.wait();

    MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    CHECK_MPI(MPI_Comm_group(comm_, &all));
    CHECK_MPI(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some));
    CHECK_MPI(MPI_Comm_create_group(comm_, some, split_tag, &comm));
    CHECK_MPI(MPI_Group_free(&some));
    CHECK_MPI(MPI_Group_free(&all));
    return make_mpi_communicator(job_, comm, name, ranks);
  }

  void progress() override { job_.progress(); }

 private:
  // Transfers under way in a group differ in their tags; the second phase of one has the next tag.
  std::unique_ptr<Transfer> start(const Collective& c) override {
    next_tag_ = (next_tag_ + 2) % most_tags;
    auto operation = std::make_unique<MpiOperation>(job_, c.name(), name(), members_);
    MpiOperation& op = *operation;
    const int tag = next_tag_;
    switch (c.kind) {
      case Collective::all_reduce:
        if (c.dtype == DType::bfloat16) {
          const Piece x = c.in[0];
          std::vector<Piece> parts;
          const auto cut = [&](int r) { return x.bytes / 2 * r / size() * 2; };
          for (int r = 0; r < size(); ++r) parts.emplace_back(x.data + cut(r), cut(r + 1) - cut(r));
          const Piece mine = parts[index(rank())];
          sum_bfloat16(op, tag, mine, parts, [this, parts, mine, tag, &op] {
            send_receive(op, tag + 1, parts, std::vector(parts.size(), mine));
          });
        } else {
          reduce(op, c, c.in[0], -1);
        }
        break;
      case Collective::reduce_scatter:
        if (c.dtype == DType::bfloat16) {
          sum_bfloat16(op, tag, c.out[0], c.in, {});
        } else {
          for (int owner = 0; owner < size(); ++owner) reduce(op, c, c.in[index(owner)], owner);
        }
        break;
      case Collective::all_gather:
      case Collective::exchange:
        send_receive(op, tag, c.out, std::vector(c.out.size(), c.in[0]));
        break;
      case Collective::all_to_all:
        send_receive(op, tag, c.out, c.in);
        break;
      case Collective::broadcast:
        each_cut(c.in[0],
                 [&](char* cut, int bytes) { CHECK_MPI(MPI_Ibcast(cut, bytes, MPI_BYTE, c.root, comm_, op.add())); });
        break;
      case Collective::barrier:
        CHECK_MPI(MPI_Ibarrier(comm_, op.add()));
    }
    return operation;
  }

  // f(data, bytes) for cuts of the piece that fit in a message.
  template <class F>
  void each_cut(Piece piece, F f) const {
    for (std::int64_t begin = 0; begin < piece.bytes; begin += job_.largest)
      f(piece.data + begin, static_cast<int>(std::min(job_.largest, piece.bytes - begin)));
  }

  // in[r] to rank r, out[r] from rank r.
  void send_receive(MpiOperation& operation, int tag, const std::vector<Piece>& out, const std::vector<Piece>& in) {
    for (int k = 1; k < size(); ++k) {
      const int from = (rank() + size() - k) % size();
      each_cut(out[index(from)], [&](char* cut, int bytes) {
        CHECK_MPI(MPI_Irecv(cut, bytes, MPI_BYTE, from, tag, comm_, operation.add()));
      });
    }
    for (int k = 1; k < size(); ++k) {
      const int to = (rank() + k) % size();
      each_cut(in[index(to)], [&](const char* cut, int bytes) {
        CHECK_MPI(MPI_Isend(cut, bytes, MPI_BYTE, to, tag, comm_, operation.add()));
      });
    }
    copy_piece(out[index(rank())], in[index(rank())]);
  }

  // c.out[0] = the sum of all ranks' `in`, at rank `root` or, for -1, at all of them; in the library's order.
  void reduce(MpiOperation& operation, const Collective& c, Piece in, int root) {
    const bool is_float = c.dtype == DType::float32, is_double = c.dtype == DType::float64;
    check(is_float || is_double || c.dtype == DType::int64, c.name(), " adds no ", name_of(c.dtype));
    const MPI_Datatype type = is_float ? MPI_FLOAT : is_double ? MPI_DOUBLE : MPI_INT64_T;
    const Piece out = c.out[0];
    each_cut(in, [&](char* cut, int bytes) {
      const int count = bytes / static_cast<int>(size_of(c.dtype));
      const bool receives = root < 0 || root == rank();
      const void* from = receives && out.data == in.data ? MPI_IN_PLACE : cut;
      void* to = receives ? out.data + (cut - in.data) : nullptr;
      CHECK_MPI(root < 0 ? MPI_Iallreduce(from, to, count, type, MPI_SUM, comm_, operation.add())
                         : MPI_Ireduce(from, to, count, type, MPI_SUM, root, comm_, operation.add()));
    });
  }

  // out = the sum of all ranks' in[rank()], added in rank order in float32; then `next`.
  void sum_bfloat16(MpiOperation& operation, int tag, Piece out, const std::vector<Piece>& in,
                    std::function<void()> next) {
    const std::int64_t n = out.bytes / size_of(DType::bfloat16);
    const auto received = std::make_shared<std::vector<bf16>>(index(n * (size() - 1)));
    std::vector<Piece> from;
    for (int r = 0; r < size(); ++r) from.emplace_back(received->data() + (r - (r > rank())) * n, out.bytes);
    from[index(rank())] = in[index(rank())];
    send_receive(operation, tag, from, in);
    operation.next = [received, from, out, n, next = std::move(next)] {
      constexpr std::int64_t block = 1024;
      float sum[block];
      for (std::int64_t begin = 0; begin < n; begin += block) {
        const std::int64_t count = std::min(block, n - begin);
        std::fill_n(sum, count, 0.0f);
        for (const Piece& piece : from) {
          const bf16* x = reinterpret_cast<const bf16*>(piece.data) + begin;
          for (std::int64_t i = 0; i < count; ++i) sum[i] += to_float(x[i]);
        }
        for (std::int64_t i = 0; i < count; ++i) put(reinterpret_cast<bf16*>(out.data)[begin + i], sum[i]);
      }
      if (next) next();
    };
  }

  MpiJob& job_;
  MPI_Comm comm_;
  std::vector<int> members_;
  int next_tag_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MpiJob& job, MPI_Comm comm, const std::string& name,
                                                    const std::vector<int>& members) {
  int rank = 0;
  CHECK_MPI(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
  CHECK_MPI(MPI_Comm_rank(comm, &rank));
  return std::make_unique<MpiCommunicator>(job, comm, name, rank, members);
}

}  // namespace onescale

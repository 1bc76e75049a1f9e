#include "parallel/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "kernels/error.h"

namespace onescale {

namespace {

class LocalCommunicator final : public Communicator {
 public:
  using Communicator::Communicator;
  std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::string& name) override {
    const auto position = std::find(members.begin(), members.end(), rank()) - members.begin();
    return make_recording_communicator(name, static_cast<int>(position), static_cast<int>(members.size()));
  }

 private:
  std::unique_ptr<Transfer> start(const Collective& c) override {
    if (size() > 1 && c.kind != Collective::exchange) return {};
    for (const Piece& out : c.out) copy_piece(out, c.in[0]);
    return {};
  }
};

std::vector<Piece> pieces(const std::vector<Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

std::int64_t bytes_of(const std::vector<Piece>& pieces) {
  std::int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

}  // namespace

void copy_piece(Piece to, Piece from) {
  if (to.data != from.data && from.bytes > 0) std::memcpy(to.data, from.data, index(from.bytes));
}

const char* Collective::name() const {
  constexpr const char* names[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                   "broadcast",  "exchange",       "barrier"};
  return names[kind];
}

// Adds the seconds that the caller spends in wait() to the group's traffic.
class Communicator::Timed final : public Transfer {
 public:
  Timed(std::unique_ptr<Transfer> inner, Communicator& group, const char* operation)
      : inner_(std::move(inner)), group_(group), operation_(operation), started_(now()) {}
  void wait() override {
    if (!inner_) return;
    const double begin = now();
    std::exchange(inner_, nullptr)->wait();
    const double end = now();
    group_.traffic_.operations[operation_].seconds += end - begin;
    if (group_.on_wait_) group_.on_wait_(operation_, started_, begin, end);
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  std::unique_ptr<Transfer> inner_;
  Communicator& group_;
  const char* operation_;
  double started_;
};

std::unique_ptr<Transfer> Communicator::run(const Collective& collective, std::int64_t sent) {
  const char* operation = collective.name();
  Traffic::Count& count = traffic_.operations[operation];
  ++count.calls;
  count.bytes += sent;
  // FNV-1a (Fowler, Noll, Vo) over the operation's name and the size of the whole, of which ranks may hold unequal
  // parts.
  const auto mix = [&](std::uint64_t value) { order_ = (order_ ^ value) * 0x100000001b3; };
  for (const char* c = operation; *c; ++c) mix(static_cast<std::uint64_t>(*c));
  mix(static_cast<std::uint64_t>(std::max(bytes_of(collective.in), bytes_of(collective.out))));
  return std::make_unique<Timed>(start(collective), *this, operation);
}

std::unique_ptr<Transfer> Communicator::all_reduce(Tensor x) {
  return run({Collective::all_reduce, {x}, {x}, x.dtype}, 2 * x.bytes() * (size_ - 1) / size_);
}

std::unique_ptr<Transfer> Communicator::reduce_scatter(Tensor out, const std::vector<Tensor>& in) {
  check(static_cast<int>(in.size()) == size_ && in[index(rank_)].numel() == out.numel(), "reduce_scatter in ", name_,
        ": ", in.size(), " pieces for ", size_, " ranks, or a result of another size");
  return run({Collective::reduce_scatter, {out}, pieces(in), out.dtype}, bytes_of(pieces(in)) - out.bytes());
}

std::unique_ptr<Transfer> Communicator::all_gather(const std::vector<Tensor>& out, Tensor in) {
  check(static_cast<int>(out.size()) == size_ && out[index(rank_)].numel() == in.numel(), "all_gather in ", name_, ": ",
        out.size(), " pieces for ", size_, " ranks, or a piece of another size");
  return run({Collective::all_gather, pieces(out), {in}}, in.bytes() * (size_ - 1));
}

std::unique_ptr<Transfer> Communicator::all_to_all(const std::vector<Tensor>& out, const std::vector<Tensor>& in) {
  check(static_cast<int>(out.size()) == size_ && static_cast<int>(in.size()) == size_, "all_to_all in ", name_, ": ",
        in.size(), " and ", out.size(), " pieces for ", size_, " ranks");
  return run({Collective::all_to_all, pieces(out), pieces(in)}, bytes_of(pieces(in)) - in[index(rank_)].bytes());
}

std::unique_ptr<Transfer> Communicator::broadcast(Tensor x, int root) {
  check(root >= 0 && root < size_, "broadcast in ", name_, ": there is no rank ", root, " among ", size_);
  return run({Collective::broadcast, {x}, {x}, x.dtype, root}, root == rank_ ? x.bytes() : 0);
}

void Communicator::barrier() {
  run({Collective::barrier, {}, {}}, 0)->wait();
}

void Communicator::exchange(void* all, const void* mine, std::int64_t bytes) {
  std::vector<Piece> out;
  for (int r = 0; r < size_; ++r) out.emplace_back(static_cast<char*>(all) + r * bytes, bytes);
  run({Collective::exchange, out, {Piece(const_cast<void*>(mine), bytes)}}, bytes * (size_ - 1))->wait();
}

std::unique_ptr<Communicator> make_recording_communicator(const std::string& name, int rank, int size) {
  return std::make_unique<LocalCommunicator>(name, rank, size);
}

std::unique_ptr<Communicator> make_single_communicator(const std::string& name) {
  return make_recording_communicator(name, 0, 1);
}

}  // namespace onescale

#include "parallel/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "kernels/error.h"

namespace onescale {

namespace {

void copy_bytes(Tensor out, Tensor in) {
  if (out.data != in.data && in.bytes() > 0) std::memcpy(out.data, in.data, static_cast<std::size_t>(in.bytes()));
}

class SingleCommunicator final : public Communicator {
 public:
  explicit SingleCommunicator(const std::string& name) : Communicator(name, 0, 1) {}
  std::unique_ptr<Communicator> split(const std::vector<int>&, const std::string& name) override {
    return make_single_communicator(name);
  }

 private:
  std::unique_ptr<Transfer> start_all_reduce(Tensor) override { return {}; }
  std::unique_ptr<Transfer> start_reduce_scatter(Tensor out, std::vector<Tensor> in) override {
    copy_bytes(out, in[0]);
    return {};
  }
  std::unique_ptr<Transfer> start_all_gather(std::vector<Tensor> out, Tensor in) override {
    copy_bytes(out[0], in);
    return {};
  }
  std::unique_ptr<Transfer> start_all_to_all(std::vector<Tensor> out, std::vector<Tensor> in) override {
    copy_bytes(out[0], in[0]);
    return {};
  }
  std::unique_ptr<Transfer> start_broadcast(Tensor, int) override { return {}; }
  void do_barrier() override {}
  void do_exchange(void* all, const void* mine, std::int64_t bytes) override {
    std::memcpy(all, mine, static_cast<std::size_t>(bytes));
  }
};

class RecordingCommunicator final : public Communicator {
 public:
  using Communicator::Communicator;
  std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::string& name) override {
    const auto position = std::find(members.begin(), members.end(), rank()) - members.begin();
    return make_recording_communicator(name, static_cast<int>(position), static_cast<int>(members.size()));
  }

 private:
  std::unique_ptr<Transfer> start_all_reduce(Tensor) override { return {}; }
  std::unique_ptr<Transfer> start_reduce_scatter(Tensor, std::vector<Tensor>) override { return {}; }
  std::unique_ptr<Transfer> start_all_gather(std::vector<Tensor>, Tensor) override { return {}; }
  std::unique_ptr<Transfer> start_all_to_all(std::vector<Tensor>, std::vector<Tensor>) override { return {}; }
  std::unique_ptr<Transfer> start_broadcast(Tensor, int) override { return {}; }
  void do_barrier() override {}
  void do_exchange(void* all, const void* mine, std::int64_t bytes) override {
    for (int r = 0; r < size(); ++r) {
      std::memcpy(static_cast<char*>(all) + r * bytes, mine, static_cast<std::size_t>(bytes));
    }
  }
};

std::int64_t bytes_but(const std::vector<Tensor>& pieces, int rank) {
  std::int64_t bytes = 0;
  for (std::size_t r = 0; r < pieces.size(); ++r) {
    if (static_cast<int>(r) != rank) bytes += pieces[r].bytes();
  }
  return bytes;
}

}  // namespace

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

void Communicator::count(const char* operation, std::int64_t sent, std::int64_t size) {
  Traffic::Count& count = traffic_.operations[operation];
  ++count.calls;
  count.bytes += sent;
  // FNV-1a (Fowler, Noll, Vo) over the operation's name and size.
  const auto mix = [&](std::uint64_t value) { order_ = (order_ ^ value) * 0x100000001b3; };
  for (const char* c = operation; *c; ++c) mix(static_cast<std::uint64_t>(*c));
  mix(static_cast<std::uint64_t>(size));
}

std::unique_ptr<Transfer> Communicator::all_reduce(Tensor x) {
  count("all_reduce", 2 * x.bytes() * (size_ - 1) / size_, x.bytes());
  return std::make_unique<Timed>(start_all_reduce(x), *this, "all_reduce");
}

std::unique_ptr<Transfer> Communicator::reduce_scatter(Tensor out, std::vector<Tensor> in) {
  check(static_cast<int>(in.size()) == size_ && in[static_cast<std::size_t>(rank_)].numel() == out.numel(),
        "reduce_scatter in ", name_, ": ", in.size(), " pieces for ", size_, " ranks, or a result of another size");
  count("reduce_scatter", bytes_but(in, rank_), bytes_but(in, -1));
  return std::make_unique<Timed>(start_reduce_scatter(out, std::move(in)), *this, "reduce_scatter");
}

std::unique_ptr<Transfer> Communicator::all_gather(std::vector<Tensor> out, Tensor in) {
  check(static_cast<int>(out.size()) == size_ && out[static_cast<std::size_t>(rank_)].numel() == in.numel(),
        "all_gather in ", name_, ": ", out.size(), " pieces for ", size_, " ranks, or a piece of another size");
  count("all_gather", in.bytes() * (size_ - 1), bytes_but(out, -1));
  return std::make_unique<Timed>(start_all_gather(std::move(out), in), *this, "all_gather");
}

std::unique_ptr<Transfer> Communicator::all_to_all(std::vector<Tensor> out, std::vector<Tensor> in) {
  check(static_cast<int>(out.size()) == size_ && static_cast<int>(in.size()) == size_, "all_to_all in ", name_, ": ",
        in.size(), " and ", out.size(), " pieces for ", size_, " ranks");
  count("all_to_all", bytes_but(in, rank_), bytes_but(in, -1));
  return std::make_unique<Timed>(start_all_to_all(std::move(out), std::move(in)), *this, "all_to_all");
}

std::unique_ptr<Transfer> Communicator::broadcast(Tensor x, int root) {
  check(root >= 0 && root < size_, "broadcast in ", name_, ": there is no rank ", root, " among ", size_);
  count("broadcast", root == rank_ ? x.bytes() : 0, x.bytes());
  return std::make_unique<Timed>(start_broadcast(x, root), *this, "broadcast");
}

// A call that waits, as a transfer.
class Communicator::Call final : public Transfer {
 public:
  explicit Call(std::function<void()> work) : work_(std::move(work)) {}
  void wait() override { work_(); }

 private:
  std::function<void()> work_;
};

void Communicator::barrier() {
  count("barrier", 0, 0);
  Timed(std::make_unique<Call>([&] { do_barrier(); }), *this, "barrier").wait();
}

void Communicator::exchange(void* all, const void* mine, std::int64_t bytes) {
  count("exchange", bytes * (size_ - 1), bytes);
  Timed(std::make_unique<Call>([&] { do_exchange(all, mine, bytes); }), *this, "exchange").wait();
}

std::unique_ptr<Communicator> make_single_communicator(const std::string& name) {
  return std::make_unique<SingleCommunicator>(name);
}

std::unique_ptr<Communicator> make_recording_communicator(const std::string& name, int rank, int size) {
  return std::make_unique<RecordingCommunicator>(name, rank, size);
}

}  // namespace onescale

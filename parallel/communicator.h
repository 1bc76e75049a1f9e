// Collective operations within a group of ranks. All ranks of a group call the same operations in the same order, from
// one thread. Nothing here divides: a reduction is a sum.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "parallel/layout.h"

namespace onescale {

// A started collective. Its tensors must stay alive and untouched until wait() has returned.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait() = 0;
};

// What a group has done since the last reset: calls and bytes that this rank sent to others, by operation, and the
// seconds spent waiting for transfers to end.
struct Traffic {
  struct Count {
    std::int64_t calls = 0, bytes = 0;
    double seconds = 0;  // of waiting
    bool operator==(const Count&) const = default;
  };
  std::map<std::string, Count> operations;
  double exposed_seconds() const {
    double sum = 0;
    for (const auto& [name, count] : operations) sum += count.seconds;
    return sum;
  }
};

// Contiguous memory of this process.
struct Piece {
  char* data;
  std::int64_t bytes;
  Piece(void* data, std::int64_t bytes) : data(static_cast<char*>(data)), bytes(bytes) {}
  Piece(const Tensor& t) : Piece(t.data, t.bytes()) {}
};
void copy_piece(Piece to, Piece from);  // of one size; from may be `to` itself

// What the ranks of a group do together, as the functions of Communicator below say. A tensor that is not one of a list
// is a list of one; x of all_reduce and broadcast is both out and in. exchange is an all_gather.
struct Collective {
  enum Kind : std::uint8_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, exchange, barrier };
  Kind kind;
  std::vector<Piece> out, in;
  DType dtype = DType::float32;  // of what is summed
  int root = 0;

  const char* name() const;
};

// Tensors are contiguous, of any dtype unless said otherwise; a piece may have no elements. Pieces are listed by rank
// of the group. Counts are 64 bits throughout.
class Communicator {
 public:
  // name: of the group, for messages and metrics: "world", "tp", "sp", "dp" or "shard".
  Communicator(std::string name, int rank, int size) : name_(std::move(name)), rank_(rank), size_(size) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // x = the sum over ranks, in place; float32, float64, int64, or bfloat16, which is added in float32 and rounded once.
  // The order of additions is the library's; parallel/tensor_parallel.h and reduction.h have fixed ones.
  std::unique_ptr<Transfer> all_reduce(Tensor x);
  // out = the sum over ranks of their in[rank()], dtypes as all_reduce. in[r] has the size of rank r's out; sizes may
  // differ between ranks. out may be in[rank()] itself.
  std::unique_ptr<Transfer> reduce_scatter(Tensor out, const std::vector<Tensor>& in);
  // out[r] = rank r's `in`. in may be out[rank()] itself.
  std::unique_ptr<Transfer> all_gather(const std::vector<Tensor>& out, Tensor in);
  // out[r] = rank r's in[rank()].
  std::unique_ptr<Transfer> all_to_all(const std::vector<Tensor>& out, const std::vector<Tensor>& in);
  std::unique_ptr<Transfer> broadcast(Tensor x, int root);
  void barrier();

  // Every rank's `bytes` bytes of host memory, by rank: the few numbers that ranks agree on. Waits.
  void exchange(void* all, const void* mine, std::int64_t bytes);
  template <class T>
  std::vector<T> exchange(const T& mine) {
    std::vector<T> all(index(size_));
    exchange(all.data(), &mine, sizeof(T));
    return all;
  }

  // The group of these ranks of this one, ascending, which include rank(). Every member calls it, no other does.
  virtual std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::string& name) = 0;
  // Lets started transfers go on, of this group and of those that it was split from or into.
  virtual void progress() {}

  // Called after each wait with the operation, when it was started, and when the wait began and ended, in seconds of
  // the steady clock; empty ends it.
  using WaitEvent = std::function<void(const char* operation, double started, double begin, double end)>;
  void on_wait(WaitEvent event) { on_wait_ = std::move(event); }

  const Traffic& traffic() const { return traffic_; }
  void reset_traffic() { traffic_ = {}; }
  // A hash of all calls so far, of their sizes and their order: equal on all ranks of the group where the pieces of
  // all_to_all are even.
  std::uint64_t order_hash() const { return order_; }

 protected:
  virtual std::unique_ptr<Transfer> start(const Collective& collective) = 0;  // null: it has ended

 private:
  class Timed;
  std::unique_ptr<Transfer> run(const Collective& collective, std::int64_t sent);  // sent: bytes to other ranks

  std::string name_;
  int rank_, size_;
  std::uint64_t order_ = 0;
  Traffic traffic_;
  WaitEvent on_wait_;
};

// Rank `rank` of `size`, which moves nothing and waits for nobody: what it counts is the plan of a step, and what tests
// compare with theory. exchange() gives every rank this rank's bytes.
std::unique_ptr<Communicator> make_recording_communicator(const std::string& name, int rank, int size);
// A group of one: copies.
std::unique_ptr<Communicator> make_single_communicator(const std::string& name);

}  // namespace onescale

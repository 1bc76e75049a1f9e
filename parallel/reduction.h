// The stream of gradients that is summed over ranks, bucket by bucket.
#pragma once

#include <deque>

#include "kernels/device.h"
#include "parallel/communicator.h"

namespace onescale {

// How gradients are summed. ordered: all-to-all, then each rank adds its shard's pieces in rank order; the others are
// the library's operations. All give the same sums, rounding aside.
enum class Reduction : std::uint8_t { ordered, reduce_scatter, all_reduce };

struct ReductionSettings {
  Reduction kind = Reduction::ordered;
  double bucket_mb = 16;        // MiB of gradients in one collective
  DType wire = DType::float32;  // what travels
};

// Sums flat buffers over a group, each rank its own part; with one rank nothing is done. A buffer of size() * n
// elements is [rank, n]; buckets take columns of it, so that every bucket holds an equal share of each rank's part. A
// bucket is sent as soon as it is at least half full: it holds a part of a large buffer, or several small ones. At most
// two are under way.
class Reducer {
 public:
  // most_columns: of all buffers of a step together, so that no bucket is larger than that.
  Reducer(Device& device, Communicator& group, const ReductionSettings& settings, std::int64_t most_columns);

  // Adds `flat` [size() * n] to the stream. Once reduced, out (+)= the sum: out [n] receives this rank's part and may
  // be that part of flat, or, with all_reduce alone, be the whole of flat. flat stays untouched until settle(flat).
  void add(Tensor flat, Tensor out, Write write);
  // Waits until nothing under way reads this buffer; it may be written again.
  void settle(Tensor flat);
  // Sends what the last bucket holds and waits for everything.
  void finish();

 private:
  struct Segment {
    Tensor flat, out;
    Write write;
    std::int64_t begin, columns, at;  // columns of flat, and where they begin in the bucket
  };
  struct Bucket {
    Tensor send, receive;  // [size() * capacity] each
    std::vector<Segment> segments;
    std::int64_t columns = 0;
    bool direct = false;  // its one segment travels from flat itself, without a copy in send
    std::unique_ptr<Transfer> transfer;
  };
  // Of a buffer [size() * n], n a rank: `count` of this rank's, from `begin` on.
  Tensor columns(Tensor flat, int rank, std::int64_t begin, std::int64_t count) const;
  // What rank `rank` will own of a segment, before it is sent.
  Tensor source(const Bucket& bucket, const Segment& segment, int rank) const;
  void start();
  void end_oldest();

  Device& dev_;
  Communicator& group_;
  ReductionSettings settings_;
  std::int64_t capacity_ = 0;          // columns of a bucket
  std::deque<Bucket> idle_, started_;  // the first idle one is being filled
};

}  // namespace onescale

#include "parallel/reduction.h"

#include <algorithm>

namespace onescale {

Reducer::Reducer(Device& device, Communicator& group, const ReductionSettings& settings, std::int64_t most_columns)
    : dev_(device), group_(group), settings_(settings) {
  const double bytes = settings.bucket_mb * 1048576 / static_cast<double>(group.size() * size_of(settings.wire));
  capacity_ = std::clamp(static_cast<std::int64_t>(bytes), std::int64_t{1}, std::max(most_columns, std::int64_t{1}));
  for (int i = 0; group.size() > 1 && i < 3; ++i) {
    Bucket bucket;
    bucket.send = device.allocate(Kind::transient, settings.wire, {group.size() * capacity_});
    if (settings.kind != Reduction::all_reduce)
      bucket.receive = device.allocate(Kind::transient, settings.wire, {group.size() * capacity_});
    idle_.push_back(std::move(bucket));
  }
}

Tensor Reducer::columns(Tensor flat, int rank, std::int64_t begin, std::int64_t count) const {
  const std::int64_t first = rank * (flat.numel() / group_.size()) + begin;
  return flat.slice(0, first, first + count);
}

Tensor Reducer::source(const Bucket& bucket, const Segment& s, int rank) const {
  if (bucket.direct) return columns(s.flat, rank, s.begin, s.columns);
  if (settings_.kind != Reduction::all_reduce) return columns(bucket.send, rank, s.at, s.columns);
  const Tensor all = bucket.send.slice(0, group_.size() * s.at, group_.size() * (s.at + s.columns));
  return columns(all, rank, 0, s.columns);  // all that is sent lies together
}

void Reducer::add(Tensor flat, Tensor out, Write write) {
  if (group_.size() == 1) return;
  const std::int64_t n = flat.numel() / group_.size();
  for (std::int64_t begin = 0; begin < n;) {
    Bucket& bucket = idle_.front();
    const Segment segment{flat, out, write, begin, std::min(capacity_ - bucket.columns, n - begin), bucket.columns};
    // all_reduce takes one contiguous tensor: a whole buffer or a copy.
    bucket.direct = bucket.columns == 0 && 2 * segment.columns >= capacity_ && settings_.wire == flat.dtype &&
                    (settings_.kind != Reduction::all_reduce || segment.columns == n);
    for (int r = 0; !bucket.direct && r < group_.size(); ++r)
      dev_.copy(source(bucket, segment, r), columns(flat, r, begin, segment.columns));
    bucket.segments.push_back(segment);
    bucket.columns += segment.columns;
    begin += segment.columns;
    if (2 * bucket.columns >= capacity_) start();
  }
}

void Reducer::start() {
  started_.push_back(std::move(idle_.front()));
  idle_.pop_front();
  Bucket& bucket = started_.back();
  const Segment& first = bucket.segments[0];
  std::vector<Tensor> from, to;
  for (int r = 0; r < group_.size(); ++r) {
    from.push_back(bucket.direct ? source(bucket, first, r) : columns(bucket.send, r, 0, bucket.columns));
    if (settings_.kind != Reduction::all_reduce) to.push_back(columns(bucket.receive, r, 0, bucket.columns));
  }
  const std::size_t me = index(group_.rank());
  if (settings_.kind == Reduction::ordered) {
    to[me] = from[me] = from[me].slice(0, 0, 0);  // the own piece stays where it is
    bucket.transfer = group_.all_to_all(to, from);
  } else if (settings_.kind == Reduction::reduce_scatter) {
    bucket.transfer = group_.reduce_scatter(to[me], from);
  } else {
    bucket.transfer =
        group_.all_reduce(bucket.direct ? first.flat : bucket.send.slice(0, 0, group_.size() * bucket.columns));
  }
  if (started_.size() > 2) end_oldest();
}

void Reducer::end_oldest() {
  Bucket& bucket = started_.front();
  bucket.transfer->wait();
  const int me = group_.rank();
  for (const Segment& s : bucket.segments) {
    const auto received = [&](int r) { return columns(bucket.receive, r, s.at, s.columns); };
    if (settings_.kind == Reduction::all_reduce && s.out.numel() == s.flat.numel()) {
      for (int r = 0; !bucket.direct && r < group_.size(); ++r)
        dev_.copy(columns(s.out, r, s.begin, s.columns), source(bucket, s, r));
      continue;
    }
    std::vector<Tensor> pieces;
    for (int r = 0; settings_.kind == Reduction::ordered && r < group_.size(); ++r) {
      pieces.push_back(r == me ? source(bucket, s, me) : received(r));
    }
    if (settings_.kind == Reduction::reduce_scatter) pieces.push_back(received(me));
    if (settings_.kind == Reduction::all_reduce) pieces.push_back(source(bucket, s, me));
    dev_.sum_pieces(s.out.slice(0, s.begin, s.begin + s.columns), pieces, s.write);
  }
  bucket.segments.clear();
  bucket.columns = 0;
  idle_.push_back(std::move(bucket));
  started_.pop_front();
}

void Reducer::settle(Tensor flat) {
  const auto reads = [&](const Bucket& bucket) { return bucket.direct && bucket.segments[0].flat.data == flat.data; };
  while (std::any_of(started_.begin(), started_.end(), reads)) end_oldest();
}

void Reducer::finish() {
  if (group_.size() > 1 && idle_.front().columns > 0) start();
  while (!started_.empty()) end_oldest();
}

}  // namespace onescale

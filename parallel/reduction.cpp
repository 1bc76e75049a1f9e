#include "parallel/reduction.h"

#include <algorithm>

namespace onescale {

namespace {

// Elements of each rank's part of `numel`, rounded up.
std::int64_t part_of(const Communicator& group, std::int64_t numel) {
  return (numel + group.size() - 1) / group.size();
}

}  // namespace

std::int64_t ordered_staging(const Communicator& group, std::int64_t numel) {
  return group.size() > 1 ? group.size() * part_of(group, numel) : 0;
}

void ordered_all_reduce(Device& device, Communicator& group, Tensor x, Tensor staging) {
  if (group.size() == 1 || x.numel() == 0) return;
  const std::int64_t n = part_of(group, x.numel());
  const Tensor flat = x.view({-1});
  std::vector<Tensor> parts, received;
  for (int r = 0; r < group.size(); ++r) {
    parts.push_back(flat.slice(0, std::min(r * n, x.numel()), std::min((r + 1) * n, x.numel())));
  }
  const auto me = static_cast<std::size_t>(group.rank());
  const std::int64_t mine = parts[me].numel();
  for (int r = 0; r < group.size(); ++r) received.push_back(staging.slice(0, r * n, r * n + mine));
  // The own part stays where it is: an empty piece travels to oneself.
  std::vector<Tensor> to = received, from = parts;
  to[me] = from[me] = parts[me].slice(0, 0, 0);
  group.all_to_all(to, from)->wait();
  received[me] = parts[me];
  device.sum_pieces(parts[me], received, Write::overwrite);
  group.all_gather(parts, parts[me])->wait();
}

Reducer::Reducer(Device& device, Communicator& group, const ReductionSettings& settings, std::int64_t most_columns)
    : dev_(device), group_(group), settings_(settings) {
  const double bytes = settings.bucket_mb * 1048576 / static_cast<double>(group.size() * size_of(settings.wire));
  capacity_ = std::clamp(static_cast<std::int64_t>(bytes), std::int64_t{1}, std::max(most_columns, std::int64_t{1}));
  for (int i = 0; i < 3; ++i) {
    Bucket bucket;
    bucket.send = device.allocate(Kind::transient, settings.wire, {group.size() * capacity_});
    if (settings.kind != Reduction::all_reduce)
      bucket.receive = device.allocate(Kind::transient, settings.wire, {group.size() * capacity_});
    idle_.push_back(std::move(bucket));
  }
}

// Where the columns of a segment that rank `rank` will own lie before they are sent.
Tensor Reducer::source(const Bucket& bucket, const Segment& s, int rank) const {
  const std::int64_t n = s.flat.numel() / group_.size();
  const std::int64_t first = bucket.direct ? rank * n + s.begin
                             : settings_.kind == Reduction::all_reduce
                                 ? group_.size() * s.at + rank * s.columns  // all that is sent lies together
                                 : rank * capacity_ + s.at;
  return (bucket.direct ? s.flat : bucket.send).slice(0, first, first + s.columns);
}

void Reducer::add(Tensor flat, Tensor out, Write write) {
  const std::int64_t n = flat.numel() / group_.size();
  for (std::int64_t begin = 0; begin < n;) {
    Bucket& bucket = idle_.front();
    const std::int64_t columns = std::min(capacity_ - bucket.columns, n - begin);
    // all_reduce takes one contiguous tensor: a whole buffer or a copy.
    bucket.direct = bucket.columns == 0 && 2 * columns >= capacity_ && settings_.wire == flat.dtype &&
                    (settings_.kind != Reduction::all_reduce || columns == n);
    const Segment segment{flat, out, write, begin, columns, bucket.columns};
    for (int r = 0; !bucket.direct && r < group_.size(); ++r) {
      dev_.copy(source(bucket, segment, r), flat.slice(0, r * n + begin, r * n + begin + columns));
    }
    bucket.segments.push_back(segment);
    bucket.columns += columns;
    begin += columns;
    if (2 * bucket.columns >= capacity_) start();
  }
}

void Reducer::start() {
  started_.push_back(std::move(idle_.front()));
  idle_.pop_front();
  Bucket& bucket = started_.back();
  std::vector<Tensor> from, to;
  for (int r = 0; r < group_.size(); ++r) {
    from.push_back(bucket.direct ? source(bucket, bucket.segments[0], r)
                                 : bucket.send.slice(0, r * capacity_, r * capacity_ + bucket.columns));
    if (settings_.kind != Reduction::all_reduce)
      to.push_back(bucket.receive.slice(0, r * capacity_, r * capacity_ + bucket.columns));
  }
  const auto me = static_cast<std::size_t>(group_.rank());
  if (settings_.kind == Reduction::ordered) {
    to[me] = from[me] = from[me].slice(0, 0, 0);  // the own piece stays where it is
    bucket.transfer = group_.all_to_all(to, from);
  } else if (settings_.kind == Reduction::reduce_scatter) {
    bucket.transfer = group_.reduce_scatter(to[me], from);
  } else {
    bucket.transfer = group_.all_reduce(bucket.direct ? bucket.segments[0].flat
                                                      : bucket.send.slice(0, 0, group_.size() * bucket.columns));
  }
  if (started_.size() > 2) end_oldest();
}

void Reducer::end_oldest() {
  Bucket& bucket = started_.front();
  bucket.transfer->wait();
  const int me = group_.rank();
  for (const Segment& s : bucket.segments) {
    const std::int64_t n = s.flat.numel() / group_.size();
    const auto received = [&](int r) {
      return bucket.receive.slice(0, r * capacity_ + s.at, r * capacity_ + s.at + s.columns);
    };
    if (settings_.kind == Reduction::all_reduce && s.out.numel() == s.flat.numel()) {
      for (int r = 0; !bucket.direct && r < group_.size(); ++r) {
        dev_.copy(s.out.slice(0, r * n + s.begin, r * n + s.begin + s.columns), source(bucket, s, r));
      }
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
  if (idle_.front().columns > 0) start();
  while (!started_.empty()) end_oldest();
}

}  // namespace onescale

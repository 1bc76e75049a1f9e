// The forms without other ranks; tests/ranks/ has the one with them.
#include "parallel/communicator.h"

#include <gtest/gtest.h>

#include "kernels/error.h"

namespace onescale {
namespace {

using Numbers = std::vector<float>;

Tensor view(Numbers& x) {
  return {x.data(), DType::float32, {static_cast<std::int64_t>(x.size())}};
}

TEST(SingleCommunicator, CopiesItsOwnPiece) {
  const auto one = make_single_communicator("world");
  const Numbers expected = {1, 2, 3};
  Numbers in = expected, out(3);
  one->all_reduce(view(in))->wait();
  EXPECT_EQ(in, expected);
  one->reduce_scatter(view(out), {view(in)})->wait();
  EXPECT_EQ(out, expected);
  out.assign(3, 0);
  one->all_gather({view(out)}, view(in))->wait();
  EXPECT_EQ(out, expected);
  out.assign(3, 0);
  one->all_to_all({view(out)}, {view(in)})->wait();
  EXPECT_EQ(out, expected);
  one->all_gather({view(out)}, view(out))->wait();  // in place
  one->broadcast(view(out), 0)->wait();
  EXPECT_EQ(out, expected);
  one->barrier();
  EXPECT_EQ(one->exchange(7.5), std::vector{7.5});
  EXPECT_EQ(one->split({0}, "tp")->name(), "tp");
}

TEST(SingleCommunicator, SendsNothing) {
  const auto one = make_single_communicator("world");
  Numbers x(8);
  one->all_reduce(view(x))->wait();
  one->all_gather({view(x)}, view(x))->wait();
  for (const auto& [operation, count] : one->traffic().operations) {
    EXPECT_EQ(count, (Traffic::Count{1, 0})) << operation;
  }
}

// The bytes that a rank sends in the ring or pairwise forms: 2 (R-1)/R of an all_reduce, everyone else's pieces of a
// reduce_scatter or an all_to_all, one's own piece to each other rank in an all_gather.
TEST(RecordingCommunicator, CountsBytesSent) {
  const auto recorded = make_recording_communicator("world", 1, 4);
  Numbers x(12);
  const auto piece = [&](std::int64_t n) { return Tensor(x.data(), DType::float32, {n}); };
  const std::vector<Tensor> pieces = {piece(1), piece(2), piece(0), piece(5)};
  recorded->all_reduce(view(x))->wait();
  recorded->reduce_scatter(piece(2), pieces)->wait();
  recorded->all_gather(pieces, piece(2))->wait();
  recorded->all_to_all(pieces, pieces)->wait();
  recorded->broadcast(piece(3), 1)->wait();
  recorded->broadcast(piece(3), 0)->wait();
  const std::map<std::string, Traffic::Count> expected = {{"all_reduce", {1, 72}},
                                                          {"reduce_scatter", {1, 24}},
                                                          {"all_gather", {1, 24}},
                                                          {"all_to_all", {1, 24}},
                                                          {"broadcast", {2, 12}}};
  EXPECT_EQ(recorded->traffic().operations, expected);
  recorded->reset_traffic();
  EXPECT_TRUE(recorded->traffic().operations.empty());
  EXPECT_EQ(recorded->exchange(3), (std::vector{3, 3, 3, 3}));
  const auto part = recorded->split({1, 3}, "shard");
  EXPECT_EQ(part->rank(), 0);
  EXPECT_EQ(part->size(), 2);
}

TEST(Communicator, TheOrderOfCallsIsInTheHash) {
  Numbers x(4);
  const auto hash = [&](std::initializer_list<int> calls) {
    const auto recorded = make_recording_communicator("world", 0, 2);
    for (const int call : calls) {
      if (call == 0) recorded->barrier();
      if (call > 0) recorded->broadcast(view(x).slice(0, 0, call), 0)->wait();
    }
    return recorded->order_hash();
  };
  EXPECT_EQ(hash({0, 1, 2}), hash({0, 1, 2}));
  EXPECT_NE(hash({0, 1, 2}), hash({1, 0, 2}));
  EXPECT_NE(hash({0, 1, 2}), hash({0, 2, 1}));
  EXPECT_NE(hash({0}), hash({0, 0}));
}

TEST(Communicator, RefusesPiecesThatDoNotFit) {
  const auto recorded = make_recording_communicator("world", 0, 2);
  Numbers x(4);
  EXPECT_THROW(recorded->all_gather({view(x)}, view(x)), Error);
  EXPECT_THROW(recorded->all_to_all({view(x), view(x)}, {view(x)}), Error);
  EXPECT_THROW(recorded->reduce_scatter(view(x).slice(0, 0, 2), {view(x), view(x)}), Error);
  EXPECT_THROW(recorded->broadcast(view(x), 2), Error);
}

}  // namespace
}  // namespace onescale

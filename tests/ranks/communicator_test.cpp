// Every operation against its closed form. Values are small integers, whose sums are exact in every dtype.
#include "parallel/communicator.h"

#include <gtest/gtest.h>

#include "kernels/bfloat16.h"
#include "parallel/layout.h"
#include "tests/ranks/ranks.h"
#include "tests/temp_dir.h"

namespace onescale {
namespace {

Communicator& all() {
  return ranks().communicator();
}

std::size_t at(int r) {
  return static_cast<std::size_t>(r);
}

// A tensor with its memory.
struct Buffer {
  Tensor tensor;
  std::vector<std::int64_t> memory;
  Buffer(DType dtype, std::int64_t n) : memory(static_cast<std::size_t>(n + 1), -1) {
    tensor = {memory.data(), dtype, {n}};
  }
  double get(std::int64_t i) const {
    switch (tensor.dtype) {
      case DType::float32:
        return tensor.as<float>()[i];
      case DType::float64:
        return tensor.as<double>()[i];
      case DType::int32:
        return tensor.as<std::int32_t>()[i];
      case DType::int64:
        return static_cast<double>(tensor.as<std::int64_t>()[i]);
      case DType::bfloat16:
        return to_float(tensor.as<bf16>()[i]);
    }
    return 0;
  }
  void set(std::int64_t i, double value) {
    switch (tensor.dtype) {
      case DType::float32:
        tensor.as<float>()[i] = static_cast<float>(value);
        break;
      case DType::float64:
        tensor.as<double>()[i] = value;
        break;
      case DType::int32:
        tensor.as<std::int32_t>()[i] = static_cast<std::int32_t>(value);
        break;
      case DType::int64:
        tensor.as<std::int64_t>()[i] = static_cast<std::int64_t>(value);
        break;
      case DType::bfloat16:
        put(tensor.as<bf16>()[i], static_cast<float>(value));
        break;
    }
  }
  template <class F>
  Buffer& fill(F f) {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) set(i, static_cast<double>(f(i)));
    return *this;
  }
  template <class F>
  void expect(F f, const char* what) const {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      ASSERT_EQ(get(i), static_cast<double>(f(i))) << what << ", " << tensor.describe() << ", element " << i;
    }
  }
};

std::vector<Tensor> views(const std::vector<Buffer>& buffers) {
  std::vector<Tensor> tensors;
  tensors.reserve(buffers.size());
  for (const Buffer& b : buffers) tensors.push_back(b.tensor);
  return tensors;
}

constexpr DType summed[] = {DType::float32, DType::float64, DType::int64, DType::bfloat16};
constexpr DType moved[] = {DType::float32, DType::float64, DType::int32, DType::int64, DType::bfloat16};

// Of `from` for `to`: some have no elements, none two are equal.
std::int64_t uneven(int from, int to) {
  return (3 * from + 5 * to) % 7 * 13;
}

TEST(Ranks, AllReduceSums) {
  const int R = all().size();
  for (const DType dtype : summed) {
    for (const std::int64_t n : {0, 1, 7, 1000}) {
      Buffer x(dtype, n);
      x.fill([](auto i) { return (all().rank() + 1) * (i % 5); });
      all().all_reduce(x.tensor)->wait();
      x.expect([&](auto i) { return R * (R + 1) / 2 * (i % 5); }, "all_reduce");
    }
  }
}

// In bfloat16 numbers from 256 on are even: 256 + 1 + 1 + 1 is 259, rounded 260, where rounding each sum gives 256.
TEST(Ranks, BFloat16IsAddedInFloat32AndRoundedOnce) {
  const int R = all().size();
  bf16 expected;
  put(expected, 256.0f + static_cast<float>(R - 1));
  Buffer x(DType::bfloat16, 9);
  x.fill([](auto) { return all().rank() == 0 ? 256 : 1; });
  std::vector<Buffer> in(at(R), x);
  for (Buffer& b : in) b.tensor.data = b.memory.data();
  Buffer out(DType::bfloat16, 9);
  all().reduce_scatter(out.tensor, views(in))->wait();
  out.expect([&](auto) { return to_float(expected); }, "reduce_scatter");
  all().all_reduce(x.tensor)->wait();
  x.expect([&](auto) { return to_float(expected); }, "all_reduce");
}

TEST(Ranks, ReduceScatterOfUnevenPieces) {
  const int R = all().size(), me = all().rank();
  for (const DType dtype : summed) {
    for (const bool in_place : {false, true}) {
      std::vector<Buffer> in;
      for (int r = 0; r < R; ++r) {
        in.emplace_back(dtype, uneven(0, r)).fill([&](auto i) { return (me + 1) * (i % 3 + r); });
      }
      Buffer separate(dtype, uneven(0, me));
      Buffer& out = in_place ? in[at(me)] : separate;
      all().reduce_scatter(out.tensor, views(in))->wait();
      out.expect([&](auto i) { return R * (R + 1) / 2 * (i % 3 + me); }, "reduce_scatter");
    }
  }
}

TEST(Ranks, AllGatherOfUnevenPieces) {
  const int R = all().size(), me = all().rank();
  for (const DType dtype : moved) {
    for (const bool in_place : {false, true}) {
      std::vector<Buffer> out;
      out.reserve(at(R));
      for (int r = 0; r < R; ++r) out.emplace_back(dtype, uneven(r, 0));
      Buffer separate(dtype, uneven(me, 0));
      Buffer& in = (in_place ? out[at(me)] : separate).fill([&](auto i) { return i % 50 + me; });
      all().all_gather(views(out), in.tensor)->wait();
      for (int r = 0; r < R; ++r) out[at(r)].expect([&](auto i) { return i % 50 + r; }, "all_gather");
    }
  }
}

TEST(Ranks, AllToAllOfUnevenPieces) {
  const int R = all().size(), me = all().rank();
  for (const DType dtype : moved) {
    std::vector<Buffer> out, in;
    for (int r = 0; r < R; ++r) {
      in.emplace_back(dtype, uneven(me, r)).fill([&](auto i) { return i % 7 + 10 * me + r; });
      out.emplace_back(dtype, uneven(r, me));
    }
    all().all_to_all(views(out), views(in))->wait();
    for (int r = 0; r < R; ++r) out[at(r)].expect([&](auto i) { return i % 7 + 10 * r + me; }, "all_to_all");
  }
}

TEST(Ranks, BroadcastFromEachRank) {
  for (const DType dtype : moved) {
    for (int root = 0; root < all().size(); ++root) {
      Buffer x(dtype, 70);
      x.fill([&](auto i) { return i + 100 * all().rank(); });
      all().broadcast(x.tensor, root)->wait();
      x.expect([&](auto i) { return Buffer(dtype, 1).fill([&](auto) { return i + 100 * root; }).get(0); }, "broadcast");
    }
  }
}

TEST(Ranks, ExchangeGivesEveryRanksNumber) {
  const std::vector<double> numbers = all().exchange(0.5 + all().rank());
  for (int r = 0; r < all().size(); ++r) EXPECT_EQ(numbers[at(r)], 0.5 + r);
  all().barrier();
}

TEST(Ranks, SumsOfOtherDtypesAreRefused) {
  Buffer x(DType::int32, 3);
  EXPECT_EQ(sentence([&] { all().all_reduce(x.tensor); }), "all_reduce adds no int32");
}

// Transfers of every kind under way at once in two groups, waited for in another order on each rank, where a bfloat16
// sum has a second phase that other ranks need.
TEST(Ranks, TransfersUnderWayAtOnceDoNotMix) {
  const int R = all().size(), me = all().rank();
  const Layout layout = make_layout(R, me, 1, R % 2 == 0 ? 2 : 1);
  const auto tp = all().split(layout.tp_group(), "tp"), shard = all().split(layout.shard_group(), "shard");
  EXPECT_EQ(tp->size(), layout.tp);
  EXPECT_EQ(tp->rank(), layout.tp_rank());
  EXPECT_EQ(shard->rank(), layout.shard_rank());
  EXPECT_EQ(shard->name(), "shard");
  for (int round = 0; round < 20; ++round) {
    std::vector<Buffer> sums, gathers;
    for (const DType dtype : summed) sums.emplace_back(dtype, 501).fill([&](auto i) { return me + i % 4; });
    sums.emplace_back(DType::bfloat16, 333).fill([&](auto i) { return me + i % 4; });
    for (int r = 0; r < 2 * R; ++r) gathers.emplace_back(DType::float32, 40 + r % R);
    std::vector<Tensor> first = views(gathers), second(first.begin() + R, first.end());
    first.resize(at(R));
    gathers[at(me)].fill([&](auto i) { return i + me; });
    gathers[at(R + me)].fill([&](auto i) { return i + 1000 * me; });

    std::vector<std::unique_ptr<Transfer>> transfers;
    transfers.push_back(all().all_gather(first, first[at(me)]));
    for (std::size_t i = 0; i < 4; ++i) transfers.push_back(shard->all_reduce(sums[i].tensor));
    transfers.push_back(all().all_gather(second, second[at(me)]));
    transfers.push_back(tp->all_reduce(sums[4].tensor));
    if (round % 2 == 0) all().progress();
    for (std::size_t i = 0; i < transfers.size(); ++i) transfers[(i * 2 + at(me) * 3) % transfers.size()]->wait();

    for (int r = 0; r < R; ++r) {
      gathers[at(r)].expect([&](auto i) { return i + r; }, "the first all_gather");
      gathers[at(R + r)].expect([&](auto i) { return i + 1000 * r; }, "the second all_gather");
    }
    const auto sum = [](const std::vector<int>& group, std::int64_t i) {
      double total = 0;
      for (const int r : group) total += r + static_cast<double>(i % 4);
      return total;
    };
    for (std::size_t k = 0; k < 4; ++k) {
      sums[k].expect([&](auto i) { return sum(layout.shard_group(), i); }, "all_reduce in shard");
    }
    sums[4].expect([&](auto i) { return sum(layout.tp_group(), i); }, "all_reduce in tp");
  }
}

// 2^31 + 9 elements, 4 GiB in bfloat16: counts and offsets that 32 bits do not hold.
TEST(RanksSlow, CountsBeyond32Bits) {
  const std::int64_t n = (std::int64_t{1} << 31) + 9;
  std::vector<bf16> memory(static_cast<std::size_t>(n));
  const Tensor x(memory.data(), DType::bfloat16, {n});
  const auto expect = [&](std::int64_t begin, std::int64_t end, int base, int factor) {
    for (std::int64_t i = begin; i < end; ++i) {
      ASSERT_EQ(to_float(memory[static_cast<std::size_t>(i)]), static_cast<float>(base + factor * (i % 13))) << i;
    }
  };
  const int R = all().size(), me = all().rank();
  for (std::int64_t i = 0; i < n; ++i) {
    put(memory[static_cast<std::size_t>(i)], static_cast<float>(me + i % 13));
  }
  all().all_reduce(x)->wait();
  expect(0, n, R * (R - 1) / 2, R);

  const std::int64_t large = n - 4 * (R - 1);  // of rank 0, and 4 of each other
  std::vector<Tensor> pieces = {x.slice(0, 0, large)};
  for (int r = 1; r < R; ++r) pieces.push_back(x.slice(0, large + 4 * (r - 1), large + 4 * r));
  const Tensor mine = pieces[at(me)];
  for (std::int64_t i = 0; i < n; ++i) put(memory[static_cast<std::size_t>(i)], -1);
  for (std::int64_t i = 0; i < mine.numel(); ++i) put(mine.as<bf16>()[i], static_cast<float>(100 * me + i % 13));
  all().all_gather(pieces, mine)->wait();
  expect(0, large, 0, 1);
  for (int r = 1; r < R; ++r) {
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(to_float(pieces[at(r)].as<bf16>()[i]), static_cast<float>(100 * r + i));
    }
  }
}

TEST(Ranks, SameOnAll) {
  ranks().check_same("the options", "lr = 1\nseed = 2\n");
  EXPECT_EQ(sentence([&] {
              ranks().check_same("the options", ranks().rank() == 2 ? "lr = 1\nseed = 3\n" : "lr = 1\nseed = 2\n");
            }),
            "the ranks differ in the options: rank 0 has 'seed = 2', rank 2 'seed = 3'; start all with the same");
}

}  // namespace
}  // namespace onescale

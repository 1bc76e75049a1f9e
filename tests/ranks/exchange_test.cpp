// What is built on the collectives, with data: sums in rank order, buckets, sequence parallelism, the norm, assembly.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "parallel/assembly.h"
#include "parallel/clip_norm.h"
#include "parallel/sequence.h"
#include "parallel/tensor_parallel.h"
#include "tests/ranks/ranks.h"

namespace onescale {
namespace {

Communicator& all() {
  return ranks().communicator();
}

float& at(Tensor t, std::int64_t i) {
  return t.as<float>()[i];
}

// 2^24 + 1 is 2^24 in float32: what the sum is says in which order it was taken.
float addend(int rank, std::int64_t i) {
  const float values[] = {16777216.0f, 1.0f, -16777216.0f, 1.0f};
  return values[(rank + i) % 4];
}
float sum_in_order(int size, std::int64_t i) {
  float sum = 0;
  for (int r = 0; r < size; ++r) sum += addend(r, i);
  return sum;
}

TEST(Exchange, TensorParallelAddsInRankOrder) {
  const auto device = make_cpu_device(1, false);
  for (const std::int64_t n : {1, 2, 7, 64, 1001}) {
    const Tensor x = device->allocate(Kind::workspace, DType::float32, {n});
    for (std::int64_t i = 0; i < n; ++i) at(x, i) = addend(all().rank(), i);
    TensorParallel(*device, all(), n).all_reduce(x);
    for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(at(x, i), sum_in_order(all().size(), i)) << n << " " << i;
  }
}

// Buffers of several sizes through buckets of several sizes, twice, the second time added: the parts are the sums.
TEST(Exchange, ReducerSumsEveryBufferInEveryBucket) {
  const auto device = make_cpu_device(1, false);
  const int R = all().size(), me = all().rank();
  const std::vector<std::int64_t> sizes = {16, 1, 300, 48, 0, 1000, 2};
  const std::int64_t columns = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  for (const Reduction kind : {Reduction::ordered, Reduction::reduce_scatter, Reduction::all_reduce}) {
    for (const double elements : {1.0, 10.0, 64.0, 1e6}) {
      Reducer reducer(*device, all(), {kind, elements * 4 / 1048576, DType::float32}, columns);
      std::vector<Tensor> flat, out;
      for (const std::int64_t n : sizes) {
        flat.push_back(device->allocate(Kind::workspace, DType::float32, {R * n}));
        out.push_back(device->allocate(Kind::workspace, DType::float32, {n}));
      }
      const auto value = [&](std::size_t b, int rank, std::int64_t i) {
        return static_cast<float>((rank + 1) * (i % 50 + static_cast<std::int64_t>(b)));
      };
      for (const Write write : {Write::overwrite, Write::accumulate}) {
        for (std::size_t b = 0; b < sizes.size(); ++b) {
          reducer.settle(flat[b]);
          for (std::int64_t i = 0; i < flat[b].numel(); ++i) at(flat[b], i) = value(b, me, i);
          reducer.add(flat[b], out[b], write);
        }
      }
      reducer.finish();
      for (std::size_t b = 0; b < sizes.size(); ++b) {
        for (std::int64_t i = 0; i < sizes[b]; ++i) {
          ASSERT_EQ(at(out[b], i), static_cast<float>(R * (R + 1)) * value(b, 0, me * sizes[b] + i))
              << static_cast<int>(kind) << " " << elements << " " << b << " " << i;
        }
      }
    }
  }
}

// q[b, t, h, c] = 1000 b + 100 t + 10 h + c on its way to all tokens of some heads and back, and gathered.
TEST(Exchange, SequenceParallelMovesTokensAndHeads) {
  const auto device = make_cpu_device(1, false);
  const int R = all().size(), me = all().rank();
  const std::int64_t B = 2, h = 2 * R, d = 3, T = 4 * R, t = T / R;
  for (const SpMode mode : {SpMode::ulysses, SpMode::gather_kv}) {
    SequenceParallel sp(*device, all(), mode, B * T * h * d, DType::float32);
    const std::vector<std::int32_t> positions = local_positions(mode, T, R, me);
    const auto make = [&](std::int64_t tokens, std::int64_t heads) {
      return device->allocate(Kind::workspace, DType::float32, {B, tokens, heads, d});
    };
    const auto each = [&](Tensor x, const auto& fn) {  // fn(element, b, t, h, c)
      for (std::int64_t i = 0; i < x.numel(); ++i)
        fn(at(x, i), i / (x.dim(1) * x.dim(2) * d), i / (x.dim(2) * d) % x.dim(1), i / d % x.dim(2), i % d);
    };
    const auto q = [](std::int64_t b, std::int64_t at, std::int64_t head, std::int64_t c) {
      return static_cast<float>(1000 * b + 100 * at + 10 * head + c);
    };
    const Tensor local = make(t, h), by_head = make(T, h / R), back = make(t, h), full = make(T, h);
    each(local, [&](float& x, auto b, auto i, auto head, auto c) {
      x = q(b, positions[static_cast<std::size_t>(i)], head, c);
    });
    sp.to_heads(by_head, local);
    each(by_head, [&](float& x, auto b, auto i, auto head, auto c) { ASSERT_EQ(x, q(b, i, me * (h / R) + head, c)); });
    sp.to_tokens(back, by_head);
    sp.gather(full, local);
    each(full, [&](float& x, auto b, auto i, auto head, auto c) { ASSERT_EQ(x, q(b, i, head, c)); });
    for (std::int64_t i = 0; i < local.numel(); ++i) ASSERT_EQ(at(back, i), at(local, i));
    each(full, [&](float& x, auto, auto, auto, auto) { x *= static_cast<float>(me + 1); });
    sp.reduce(back, full);
    for (std::int64_t i = 0; i < local.numel(); ++i)
      ASSERT_EQ(at(back, i), 0.5f * static_cast<float>(R * (R + 1)) * at(local, i));
  }
}

// A table with every rule; two rows of "qkv" have a gradient that is partial over tp.
ParameterTable small_table(int tp) {
  ParameterTable table;
  table.parameters = {{"vocabulary", {5, 7}, 0, TpRule::rows},
                      {"positions", {9, 7}, 0, TpRule::replicated},
                      {"qkv", {tp + 2, 1}, 1, TpRule::fused_qkv, 2},
                      {"columns", {3, 2 * tp}, 1, TpRule::columns},
                      {"bias", {11}, 1, TpRule::replicated}};
  table.units = 2;
  return table;
}

// Layouts of all ranks of this program.
std::vector<Layout> layouts() {
  std::vector<Layout> list;
  for (int tp = 1; tp <= all().size(); ++tp) {
    if (all().size() % tp == 0) list.push_back(make_layout(all().size(), all().rank(), 1, tp));
  }
  return list;
}

TEST(Exchange, AssemblyPutsEveryElementInItsPlace) {
  const auto device = make_cpu_device(1, false);
  for (const Layout& layout : layouts()) {
    Mesh mesh(all(), layout);
    const Placement place(small_table(layout.tp), layout);
    std::vector<Owned> parts;
    for (int unit = 0; unit < place.units(); ++unit) {
      parts.push_back(
          {device->allocate(Kind::workspace, DType::float32, {place.flat.shard_numel(unit)}), place.owned_begin(unit)});
      device->fill(parts.back().data, NAN);  // padding, which must not leave
    }
    for (std::size_t i = 0; i < place.table().parameters.size(); ++i) {
      const Owned owned = parts[static_cast<std::size_t>(place.table().parameters[i].unit)];
      const std::int64_t shift = place.flat.offset[i] - owned.begin;
      place.slices.for_each_run(i, std::max<std::int64_t>(-shift, 0), owned.data.numel() - shift,
                                [&](std::int64_t local, std::int64_t whole, std::int64_t count) {
                                  for (std::int64_t e = 0; e < count; ++e)
                                    at(owned.data, local + shift + e) = static_cast<float>(whole + e);
                                });
    }
    const Assembly assembly(mesh, place);
    const auto count = static_cast<std::int64_t>(place.table().parameters.size());
    for (std::int64_t turn = 0; turn <= count; ++turn) {
      std::vector<std::int64_t> wanted(static_cast<std::size_t>(all().size()));  // each rank another one, some none
      for (std::size_t r = 0; r < wanted.size(); ++r)
        wanted[r] = (turn + static_cast<std::int64_t>(r)) % (count + 1) - 1;
      const std::int64_t mine = wanted[static_cast<std::size_t>(all().rank())];
      const std::int64_t n = mine < 0 ? 0 : place.slices.whole().parameters[static_cast<std::size_t>(mine)].numel();
      std::vector<float> out(static_cast<std::size_t>(n), -1.0f), want(out);
      std::iota(want.begin(), want.end(), 0.0f);
      assembly.gather(
          wanted, [&](int unit) { return parts[static_cast<std::size_t>(unit)]; }, out.data());
      EXPECT_EQ(out, want) << layout.text() << " parameter " << mine;
    }
  }
}

// Two tensor-parallel ranks with query gradients 3 and 4, and K and V rows whose parts add up to 144 of squares on
// both: one parameter of norm 13. Counting the replicated rows on both ranks gives 17.692, and a clip at 15 would act.
TEST(Exchange, NormCountsReplicatedRowsOnce) {
  if (all().rank() >= 2) return;
  const auto pair = all().split({0, 1}, "world");
  const Layout layout{1, 1, 2, pair->rank()};
  Mesh mesh(*pair, layout);
  const auto device = make_cpu_device(1, false);
  for (const Reduction kind : {Reduction::ordered, Reduction::reduce_scatter, Reduction::all_reduce}) {
    const Placement place(small_table(2), layout);
    const auto gradients = make_gradients(*device, mesh, place, {0, {kind, 1, DType::float32}, DType::float32});
    gradients->begin_step(1);
    for (int unit = 0; unit < 2; ++unit) {
      for (const Tensor& t : gradients->open(unit).tensors) device->fill(t, 0);
    }
    const Tensor qkv = gradients->open(1).tensors[0];  // [one Q row | K | V]
    at(qkv, 0) = layout.rank == 0 ? 3.0f : 4.0f;
    const float kv = std::sqrt(72.0f);
    at(qkv, 1) = at(qkv, 2) = kv * (layout.rank == 0 ? 0.25f : 0.75f);  // partial: each rank saw its own heads
    gradients->close(0);
    gradients->close(1);
    gradients->finish();
    const Tensor scratch = device->allocate(Kind::workspace, DType::float64, {1});
    EXPECT_NEAR(gradient_norm(*device, mesh, place, *gradients, scratch), 13, 1e-6);  // 72 has no root in float32
  }
}

}  // namespace
}  // namespace onescale

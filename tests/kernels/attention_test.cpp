// Attention against plain float64 loops that hold every probability, on views of packed [.., Q | K | V] buffers as the
// model makes them.
#include <algorithm>
#include <limits>
#include <map>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// What queries see, and where they stand in the whole sequence (which keys the dropout).
struct Sight {
  Indices first, last, positions;  // [B, n_q]
};
using SightOf = std::function<Sight(std::int64_t B, std::int64_t n_q, std::int64_t n_k)>;

Sight sight(std::int64_t B, std::int64_t n_q,
            const std::function<std::array<std::int64_t, 3>(std::int64_t b, std::int64_t i)>& f) {
  Sight s;
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t i = 0; i < n_q; ++i) {
      const auto [first, last, position] = f(b, i);
      s.first.push_back(static_cast<std::int32_t>(first));
      s.last.push_back(static_cast<std::int32_t>(last));
      s.positions.push_back(static_cast<std::int32_t>(position));
    }
  return s;
}

using Three = std::array<std::int64_t, 3>;

Sight causal(std::int64_t B, std::int64_t n_q, std::int64_t) {
  return sight(B, n_q, [](auto, auto i) { return Three{0, i, i}; });
}
Sight window(std::int64_t B, std::int64_t n_q, std::int64_t) {
  return sight(B, n_q, [](auto b, auto i) { return Three{std::max<std::int64_t>(0, i - 5 - 3 * b), i, i}; });
}
// The last queries of a sequence whose keys are all here; one query is cached decoding.
Sight shard(std::int64_t B, std::int64_t n_q, std::int64_t n_k) {
  return sight(B, n_q, [=](auto, auto i) { return Three{0, n_k - n_q + i, n_k - n_q + i}; });
}
// Chunks 1 and 2 of four: what rank 1 of 2 holds of a sequence cut in zigzag.
Sight zigzag(std::int64_t B, std::int64_t n_q, std::int64_t n_k) {
  return sight(B, n_q, [=](auto, auto i) {
    const auto position = n_k / 4 + i;
    return Three{0, position, position};
  });
}
// Chunks 0 and 3, so that the ranges jump in the middle.
Sight zigzag_ends(std::int64_t B, std::int64_t n_q, std::int64_t n_k) {
  return sight(B, n_q, [=](auto, auto i) {
    const auto position = i < n_q / 2 ? i : n_k - n_q + i;
    return Three{0, position, position};
  });
}
// Documents of different lengths in each row; positions start again with each.
Sight documents(std::int64_t B, std::int64_t n_q, std::int64_t) {
  return sight(B, n_q, [](auto b, auto i) {
    const auto length = 9 + 20 * b, start = i / length * length;
    return Three{start, i, i - start};
  });
}
Sight whole(std::int64_t B, std::int64_t n_q, std::int64_t n_k) {
  return sight(B, n_q, [=](auto, auto i) { return Three{0, n_k - 1, i}; });
}
// Every third query sees nothing, and in the first row of the batch nobody does; keys at the end are seen by none.
Sight blind(std::int64_t B, std::int64_t n_q, std::int64_t n_k) {
  return sight(B, n_q, [=](auto b, auto i) {
    return b == 0 || i % 3 == 1 ? Three{4, 3, i} : Three{i % 7, std::min(i, n_k / 2), i};
  });
}

struct Case {
  const char* name;
  std::int64_t B, n_q, n_k, h, h_kv, d;
  SightOf sight;
  float p = 0;
};

std::vector<Case> cases() {
  return {{"causal MQA", 1, 7, 7, 3, 1, 8, causal},
          {"causal MHA", 3, 13, 13, 4, 4, 12, causal},
          {"causal MQA, longer than a block", 1, 130, 130, 12, 1, 64, causal},
          {"causal MHA, longer than a block", 1, 130, 130, 3, 3, 80, causal},
          {"causal MQA, head of 128 and more", 2, 66, 66, 2, 1, 130, causal},
          {"causal MQA, many rows", 2, 257, 257, 5, 1, 16, causal},
          {"causal MQA, heads that tasks do not share evenly", 2, 70, 70, 7, 1, 8, causal, 0.3f},
          {"causal MHA with dropout", 3, 130, 130, 4, 4, 12, causal, 0.3f},
          {"causal MQA with dropout", 3, 130, 130, 4, 1, 64, causal, 0.3f},
          {"window", 3, 130, 130, 3, 1, 8, window},
          {"window with dropout", 3, 130, 130, 4, 4, 8, window, 0.3f},
          {"shard", 3, 50, 130, 3, 1, 64, shard},
          {"shard with dropout", 3, 50, 150, 4, 4, 8, shard, 0.3f},
          {"one new token, MQA", 3, 1, 331, 12, 1, 64, shard},
          {"one new token, MHA", 1, 1, 700, 4, 4, 80, shard},
          {"zigzag", 1, 70, 140, 4, 1, 12, zigzag},
          {"zigzag with dropout", 3, 70, 140, 4, 4, 12, zigzag_ends, 0.3f},
          {"documents", 3, 130, 130, 4, 1, 12, documents},
          {"documents with dropout", 3, 130, 130, 3, 3, 80, documents, 0.3f},
          {"all keys", 3, 13, 77, 3, 3, 12, whole},
          {"nothing visible", 3, 130, 130, 3, 1, 12, blind},
          {"nothing visible, MHA with dropout", 3, 130, 130, 3, 3, 64, blind, 0.3f}};
}

// Where element e of a head stands in a packed buffer [B, n, width()]: [heads of Q | K | V] with one K/V head, [Q | K |
// V] of each head otherwise.
struct Packing {
  std::int64_t n, h, h_kv, d;
  std::int64_t width() const { return (h_kv == 1 ? h + 2 : 3 * h) * d; }
  std::size_t at(int which, std::int64_t b, std::int64_t i, std::int64_t head, std::int64_t e) const {
    const std::int64_t slot = h_kv == 1 ? (which == 0 ? head : h + which - 1) : 3 * head + which;
    return static_cast<std::size_t>((b * n + i) * width() + slot * d + e);
  }
  Tensor view(Tensor t, int which) const {
    if (h_kv != 1) return t.split_last(h, 3 * d).slice(3, which * d, (which + 1) * d);
    if (which == 0) return t.slice(2, 0, h * d).split_last(h, d);
    return t.slice(2, (h + which - 1) * d, (h + which) * d).split_last(1, d);
  }
};

Dropout dropout_of(const Case& c) {
  Dropout d;
  d.p = c.p, d.seed = 0x123456789abcdef, d.step = 11, d.layer = 3, d.site = Site::attention, d.first_row = 5,
  d.first_head = 2;
  return d;
}

struct Reference {
  Values o, lse;           // [B, n_q, h, d], [B, n_q, h]
  Values dqueries, dkeys;  // as the packed buffers; 777 where nothing is to be written
};

// queries [B, n_q, width], keys [B, n_k, width]: the packed buffers of which q, and k and v, are used. dout as o, or
// empty for the forward pass alone.
Reference reference(const Case& c, const Sight& s, const Values& queries, const Values& keys, const Values& dout) {
  const Packing pq{c.n_q, c.h, c.h_kv, c.d}, pk{c.n_k, c.h, c.h_kv, c.d};
  const Dropout drop = dropout_of(c);
  const double scale = 1 / std::sqrt(static_cast<double>(c.d));
  Reference r{Values(static_cast<std::size_t>(c.B * c.n_q * c.h * c.d)),
              Values(static_cast<std::size_t>(c.B * c.n_q * c.h)), Values(queries.size(), 777),
              Values(keys.size(), 777)};
  for (std::int64_t b = 0; b < c.B; ++b)
    for (std::int64_t e = 0; e < c.d; ++e) {
      for (std::int64_t i = 0; i < c.n_q; ++i)
        for (std::int64_t head = 0; head < c.h; ++head) r.dqueries[pq.at(0, b, i, head, e)] = 0;
      for (std::int64_t j = 0; j < c.n_k; ++j)
        for (std::int64_t head = 0; head < c.h_kv; ++head)
          r.dkeys[pk.at(1, b, j, head, e)] = r.dkeys[pk.at(2, b, j, head, e)] = 0;
    }
  for (std::int64_t b = 0; b < c.B; ++b)
    for (std::int64_t i = 0; i < c.n_q; ++i)
      for (std::int64_t head = 0; head < c.h; ++head) {
        const auto token = static_cast<std::size_t>(b * c.n_q + i),
                   row = token * static_cast<std::size_t>(c.h) + static_cast<std::size_t>(head);
        const std::int64_t kv = c.h_kv == 1 ? 0 : head, first = s.first[token], last = s.last[token];
        Values p, mask;
        double most = -infinity, sum = 0;
        for (std::int64_t j = first; j <= last; ++j) {
          double score = 0;
          for (std::int64_t e = 0; e < c.d; ++e)
            score += queries[pq.at(0, b, i, head, e)] * keys[pk.at(1, b, j, kv, e)];
          p.push_back(score * scale);
          most = std::max(most, p.back());
          mask.push_back(1);
          if (c.p == 0) continue;
          const auto words = philox(dropout_counter(drop.site, drop.layer, drop.step, drop.first_row + b,
                                                    s.positions[token], attention_group(drop.first_head + head, j)),
                                    drop.seed);
          mask.back() =
              words[static_cast<std::size_t>(j % 4)] < drop_threshold(c.p) ? 0 : 1 / (1 - static_cast<double>(c.p));
        }
        for (double& x : p) x = std::exp(x - most), sum += x;
        for (double& x : p) x /= sum;
        r.lse[row] = most + std::log(sum);
        const auto each = [&](auto&& body) {
          for (std::size_t j = 0; j < p.size(); ++j)
            for (std::int64_t e = 0; e < c.d; ++e)
              body(j, first + static_cast<std::int64_t>(j), e,
                   row * static_cast<std::size_t>(c.d) + static_cast<std::size_t>(e));
        };
        each([&](auto j, auto key, auto e, auto out) { r.o[out] += p[j] * mask[j] * keys[pk.at(2, b, key, kv, e)]; });
        if (dout.empty()) continue;
        Values dp(p.size());
        double mean = 0;
        each([&](auto j, auto key, auto e, auto out) {
          dp[j] += mask[j] * dout[out] * keys[pk.at(2, b, key, kv, e)];
          r.dkeys[pk.at(2, b, key, kv, e)] += p[j] * mask[j] * dout[out];
        });
        for (std::size_t j = 0; j < p.size(); ++j) mean += p[j] * dp[j];
        each([&](auto j, auto key, auto e, auto) {
          const double ds = p[j] * (dp[j] - mean) * scale;
          r.dqueries[pq.at(0, b, i, head, e)] += ds * keys[pk.at(1, b, key, kv, e)];
          r.dkeys[pk.at(1, b, key, kv, e)] += ds * queries[pq.at(0, b, i, head, e)];
        });
      }
  return r;
}

struct Inputs {
  Values queries, keys, dout;
  Inputs(const Case& c, DType dtype)
      : queries(randoms(c.B * c.n_q * Packing{c.n_q, c.h, c.h_kv, c.d}.width(), 1, dtype)),
        keys(randoms(c.B * c.n_k * Packing{c.n_k, c.h, c.h_kv, c.d}.width(), 2, dtype)),
        dout(randoms(c.B * c.n_q * c.h * c.d, 3, dtype)) {}
};

// What the device computes, in the form of the reference.
Reference compute(Device& device, DType dtype, const Case& c, const Sight& s, const Inputs& in) {
  const Packing pq{c.n_q, c.h, c.h_kv, c.d}, pk{c.n_k, c.h, c.h_kv, c.d};
  const Tensor queries = put(device, dtype, {c.B, c.n_q, pq.width()}, in.queries),
               keys = put(device, dtype, {c.B, c.n_k, pk.width()}, in.keys);
  const Tensor dqueries = garbage(device, dtype, {c.B, c.n_q, pq.width()}),
               dkeys = garbage(device, dtype, {c.B, c.n_k, pk.width()});
  const Tensor dout = put(device, dtype, {c.B, c.n_q, c.h, c.d}, in.dout),
               o = garbage(device, dtype, {c.B, c.n_q, c.h, c.d});
  const Tensor lse = garbage(device, DType::float32, {c.B, c.n_q, c.h});
  const Visible visible{put(device, {c.B, c.n_q}, s.first), put(device, {c.B, c.n_q}, s.last)};
  Dropout dropout = dropout_of(c);
  dropout.positions = put(device, {c.B, c.n_q}, s.positions);
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.d)));
  const Tensor q = pq.view(queries, 0), k = pk.view(keys, 1), v = pk.view(keys, 2);
  device.attention(o, lse, q, k, v, scale, visible, dropout);
  device.attention_backward(pq.view(dqueries, 0), pk.view(dkeys, 1), pk.view(dkeys, 2), dout, o, lse, q, k, v, scale,
                            visible, dropout);
  return {get(device, o), get(device, lse), get(device, dqueries), get(device, dkeys)};
}

// The elements of a packed buffer that belong to part `which`.
Values part(const Case& c, const Values& packed, std::int64_t n, int which) {
  const Packing p{n, c.h, c.h_kv, c.d};
  Values values;
  for (std::int64_t b = 0; b < c.B; ++b)
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t head = 0; head < (which == 0 ? c.h : c.h_kv); ++head)
        for (std::int64_t e = 0; e < c.d; ++e) values.push_back(packed[p.at(which, b, i, head, e)]);
  return values;
}

class Attention : public Contract {};
CONTRACT_SUITE(Attention);

TEST_P(Attention, AgreesWithFloat64) {
  const auto device = make();
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const Sight s = c.sight(c.B, c.n_q, c.n_k);
    const Inputs in(c, dtype());
    const Reference want = reference(c, s, in.queries, in.keys, in.dout), got = compute(*device, dtype(), c, s, in);
    EXPECT_LT(relative_error(got.o, want.o), tolerance());
    for (std::size_t i = 0; i < want.lse.size();
         ++i) {  // a float32 sum of up to n_k terms; -infinity where nothing is seen
      if (want.lse[i] == -infinity) {
        EXPECT_EQ(got.lse[i], -infinity);
      } else {
        EXPECT_NEAR(got.lse[i], want.lse[i], 1e-5 * (1 + std::abs(want.lse[i])));
      }
    }
    EXPECT_LT(relative_error(part(c, got.dqueries, c.n_q, 0), part(c, want.dqueries, c.n_q, 0)), tolerance()) << "dq";
    EXPECT_LT(relative_error(part(c, got.dkeys, c.n_k, 1), part(c, want.dkeys, c.n_k, 1)), tolerance()) << "dk";
    EXPECT_LT(relative_error(part(c, got.dkeys, c.n_k, 2), part(c, want.dkeys, c.n_k, 2)), tolerance()) << "dv";
    const double unwritten = rounded({777}, dtype())[0];
    for (int which : {1, 2})
      for (const double x : part(c, got.dqueries, c.n_q, which)) ASSERT_EQ(x, unwritten);
    for (const double x : part(c, got.dkeys, c.n_k, 0)) ASSERT_EQ(x, unwritten);
  }
}

TEST_P(Attention, GivesTheSameBitsForAnyNumberOfThreads) {
  const std::array devices = {make(1), make(2), make(3)};
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const Sight s = c.sight(c.B, c.n_q, c.n_k);
    const Inputs in(c, dtype());
    const Reference one = compute(*devices[0], dtype(), c, s, in);
    for (const std::size_t more : {1U, 2U}) {
      const Reference again = compute(*devices[more], dtype(), c, s, in);
      EXPECT_EQ(one.o, again.o);
      EXPECT_EQ(one.lse, again.lse);
      EXPECT_EQ(one.dqueries, again.dqueries);
      EXPECT_EQ(one.dkeys, again.dkeys);
    }
  }
}

// Scores far apart and far from 0: nothing overflows, and the largest one, which comes late, is not lost. With scores
// of up to 400 the rounding of a float32 score alone is 400 * 2^-24 = 2.4e-5 of a probability.
TEST_P(Attention, StandsLargeScores) {
  const Case c{"", 1, 200, 200, 2, 1, 16, causal};
  const Sight s = c.sight(c.B, c.n_q, c.n_k);
  Inputs in(c, dtype());
  for (double& x : in.queries) x *= 16;
  const Packing p{c.n_k, c.h, c.h_kv, c.d};
  for (std::int64_t j = 0; j < c.n_k; ++j)
    for (std::int64_t e = 0; e < c.d; ++e) in.keys[p.at(1, 0, j, 0, e)] *= j < 100 ? 1 : 4;
  const Reference want = reference(c, s, in.queries, in.keys, in.dout), got = compute(*make(), dtype(), c, s, in);
  EXPECT_LT(relative_error(got.o, want.o), std::max(tolerance(), 1e-4));
  EXPECT_LT(relative_error(got.lse, want.lse), 1e-5);
}

// A dry device asks for the scratch that a real one takes, and that scratch is linear in the length of the sequence.
TEST_P(Attention, TakesTheScratchOfTheDryRunAndNoSquareOfTheLength) {
  const auto scratch = [&](Device& device, std::int64_t T, std::int64_t h_kv) {
    const std::int64_t h = 3, d = 20, B = 2;
    const auto tensor = [&](DType type, Shape shape) { return device.allocate(Kind::workspace, type, shape); };
    const Visible visible{tensor(DType::int32, {B, T}), tensor(DType::int32, {B, T})};
    const Tensor q = tensor(dtype(), {B, T, h, d}), k = tensor(dtype(), {B, T, h_kv, d}),
                 lse = tensor(DType::float32, {B, T, h});
    device.attention(q, lse, q, k, k, 1, visible, {});
    device.attention_backward(q, k, k, q, q, lse, q, k, k, 1, visible, {});
    return device.memory()[static_cast<std::size_t>(Kind::kernel_scratch)];
  };
  for (std::int64_t h_kv : {1, 3}) {
    EXPECT_EQ(scratch(*make(2, true), 300, h_kv), scratch(*make(2, false), 300, h_kv));
    const std::int64_t one = scratch(*make(2, true), 16384, h_kv), two = scratch(*make(2, true), 32768, h_kv);
    EXPECT_LE(two, 2 * one);
    EXPECT_LT(two, 32768LL * 4 * 1000);  // a square would be 4 GiB
  }
}

TEST_P(Attention, CountsTheWorkOfVisiblePairs) {
  const Case c{"", 3, 50, 130, 4, 1, 12, shard};
  const auto device = make();
  std::map<std::string, double> flops;
  device->trace([&](const Operation& o) { flops[o.name] += o.flops; });
  compute(*device, dtype(), c, c.sight(c.B, c.n_q, c.n_k), Inputs(c, dtype()));
  double pairs = 0;
  for (std::int64_t i = 0; i < c.n_q; ++i) pairs += static_cast<double>(c.B * c.h * (c.n_k - c.n_q + i + 1));
  EXPECT_EQ(flops["attention"], pairs * 4 * static_cast<double>(c.d));
  EXPECT_EQ(flops["attention_backward"], pairs * 10 * static_cast<double>(c.d));
}

TEST_P(Attention, RefusesWhatDoesNotFit) {
  const auto device = make();
  const auto tensor = [&](DType type, Shape shape) { return device->allocate(Kind::workspace, type, shape); };
  const Visible visible{tensor(DType::int32, {2, 5}), tensor(DType::int32, {2, 5})};
  const Tensor q = tensor(dtype(), {2, 5, 4, 8}), k = tensor(dtype(), {2, 5, 1, 8}),
               lse = tensor(DType::float32, {2, 5, 4});
  const auto fails = [&](const Tensor& o, const Tensor& l, const Tensor& key, const Tensor& value, const Visible& range,
                         float p) {
    Dropout dropout;
    dropout.p = p;
    return !sentence([&] { device->attention(o, l, q, key, value, 1, range, dropout); }).empty();
  };
  EXPECT_FALSE(fails(q, lse, k, k, visible, 0));
  EXPECT_TRUE(fails(tensor(dtype(), {2, 5, 4, 9}), lse, k, k, visible, 0));
  EXPECT_TRUE(fails(q, tensor(DType::float32, {2, 4, 5}), k, k, visible, 0));
  EXPECT_TRUE(fails(q, lse, tensor(dtype(), {2, 5, 2, 8}), tensor(dtype(), {2, 5, 2, 8}), visible,
                    0));  // neither 1 nor h heads
  EXPECT_TRUE(fails(q, lse, k, tensor(dtype(), {2, 6, 1, 8}), visible, 0));
  EXPECT_TRUE(fails(q, lse, tensor(DType::int32, {2, 5, 1, 8}), k, visible, 0));
  EXPECT_TRUE(fails(q, lse, k, k, {visible.first, tensor(DType::int32, {2, 4})}, 0));
  EXPECT_TRUE(fails(q, lse, k, k, visible, 0.5f));  // dropout without positions
  EXPECT_TRUE(fails(q, lse, k, k, visible, 1));
}

// The reference itself: its gradients are the derivatives of its outputs (float64, so central differences leave about
// 1e-9).
TEST(AttentionReference, HasTheGradientsOfItsOutputs) {
  for (const Case& c : {Case{"MQA", 2, 5, 7, 3, 1, 4, shard, 0.3f}, Case{"MHA", 2, 6, 6, 2, 2, 3, documents, 0},
                        Case{"blind", 2, 6, 6, 2, 1, 3, blind, 0}}) {
    const Sight s = c.sight(c.B, c.n_q, c.n_k);
    const Inputs in(c, DType::float64);
    const Reference r = reference(c, s, in.queries, in.keys, in.dout);
    const Values dqueries =
        numeric_gradient([&](const Values& x) { return dot(reference(c, s, x, in.keys, {}).o, in.dout); }, in.queries);
    const Values dkeys =
        numeric_gradient([&](const Values& x) { return dot(reference(c, s, in.queries, x, {}).o, in.dout); }, in.keys);
    EXPECT_LT(relative_error(part(c, dqueries, c.n_q, 0), part(c, r.dqueries, c.n_q, 0)), 1e-6) << c.name;
    for (int which : {1, 2})
      EXPECT_LT(relative_error(part(c, dkeys, c.n_k, which), part(c, r.dkeys, c.n_k, which)), 1e-6) << c.name;
  }
}

}  // namespace
}  // namespace onescale::contract

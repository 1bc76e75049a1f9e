// Memory, scratch, the operations reported, transfers, fill and copy.
#include <cstring>

#include "tests/kernels/contract.h"

namespace onescale::contract {
namespace {

class Memory : public Contract {};
CONTRACT_SUITE(Memory);

TEST_P(Memory, IsZeroedAlignedAndCounted) {
  const auto device = make();
  const Tensor a = device->allocate(Kind::parameters, dtype(), {3, 37}),
               b = device->allocate(Kind::batches, DType::int32, {7});
  EXPECT_EQ(get(*device, a), Values(111, 0.0));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data) % 64, 0u);
  EXPECT_EQ(device->memory()[static_cast<int>(Kind::parameters)], 111 * size_of(dtype()));
  EXPECT_EQ(device->memory()[static_cast<int>(Kind::batches)], 28);
  EXPECT_EQ(device->memory()[static_cast<int>(Kind::gradients)], 0);
  EXPECT_FALSE(device->describe().empty());
  EXPECT_EQ(device->allocate(Kind::workspace, dtype(), {0, 5}).numel(), 0);
}

// Numbers of elements around the pieces into which threads cut their work.
TEST_P(Memory, UploadDownloadAndFill) {
  for (const std::int64_t n : {1, 48, 16384, 16385, 50001}) {
    for (int threads = 1; threads <= 3; ++threads) {
      const auto device = make(threads);
      const Values x = randoms(n, 1, dtype());
      const Tensor t = put(*device, dtype(), {n}, x);
      EXPECT_EQ(get(*device, t), x);
      device->fill(t, 2.5f);
      EXPECT_EQ(get(*device, t), Values(static_cast<std::size_t>(n), 2.5));
    }
  }
  const auto device = make();
  const Tensor t = device->allocate(Kind::workspace, DType::float64, {5});
  device->fill(t, 3);
  EXPECT_EQ(get(*device, t), Values(5, 3.0));
}

TEST_P(Memory, FillsASliceOnly) {
  const auto device = make();
  const Tensor t = put(*device, dtype(), {3, 4}, Values(12, 1.0));
  device->fill(t.slice(0, 1, 2), 7);
  EXPECT_EQ(get(*device, t), (Values{1, 1, 1, 1, 7, 7, 7, 7, 1, 1, 1, 1}));
}

TEST_P(Memory, CopyConvertsWithOneRounding) {
  const auto device = make(3);
  const Values x = randoms(40000, 2, DType::float32);
  const Tensor from = put(*device, DType::float32, {40000}, x), to = garbage(*device, dtype(), {40000}),
               back = garbage(*device, DType::float32, {40000});
  device->copy(to, from);
  EXPECT_EQ(get(*device, to), rounded(x, dtype()));
  device->copy(back, to);
  EXPECT_EQ(get(*device, back), rounded(x, dtype()));
}

// dst[i, j, k] = src[i, j, k] for a source whose axes are swapped, sliced, and of one element.
TEST_P(Memory, CopyTakesAnyStrides) {
  const auto device = make(2);
  const Values x = randoms(4 * 37 * 5, 3, dtype());
  Tensor from = put(*device, dtype(), {4, 37, 5}, x);
  std::swap(from.shape[0], from.shape[2]);
  std::swap(from.stride[0], from.stride[2]);
  const Tensor to = garbage(*device, DType::float32, {7, 37, 4});
  device->copy(to.slice(0, 1, 6), from);
  const Values got = get(*device, to);
  for (std::size_t i = 0; i < 7; ++i) {
    for (std::size_t j = 0; j < 37; ++j) {
      for (std::size_t k = 0; k < 4; ++k) {
        ASSERT_EQ(got[(i * 37 + j) * 4 + k], i == 0 || i == 6 ? 777 : x[(k * 37 + j) * 5 + i - 1])
            << i << " " << j << " " << k;
      }
    }
  }
  const Tensor one = garbage(*device, dtype(), {1, 1, 1});
  device->copy(one, from.slice(0, 2, 3).slice(1, 3, 4).slice(2, 1, 2));
  EXPECT_EQ(get(*device, one), Values(1, x[(1 * 37 + 3) * 5 + 2]));
  device->copy(from.slice(0, 0, 0), from.slice(0, 1, 1));  // nothing
  const Tensor labels = put(*device, {2, 3}, Indices{1, 2, 3, 4, 5, 6}),
               column = garbage(*device, DType::int32, {2, 1});
  device->copy(column, labels.slice(1, 2, 3));
  EXPECT_EQ(get(*device, column), (Values{3, 6}));
}

TEST_P(Memory, RefusesWhatDoesNotFit) {
  const auto device = make();
  const Tensor a = device->allocate(Kind::workspace, dtype(), {2, 3}),
               b = device->allocate(Kind::workspace, dtype(), {3, 2});
  const Tensor labels = device->allocate(Kind::workspace, DType::int32, {2, 3});
  EXPECT_EQ(sentence([&] { device->copy(a, b); }),
            str("copy: dst is ", a.describe(), ", src ", b.describe(), "; they must have one shape"));
  EXPECT_NE(sentence([&] { device->copy(a, labels); }), "");
  EXPECT_NE(sentence([&] { device->fill({}, 0); }), "");
  EXPECT_NE(sentence([&] { device->fill(a.slice(1, 0, 2), 0); }), "");
  EXPECT_NE(sentence([&] { device->fill(labels, 0); }), "");
  float host[6];
  EXPECT_NE(sentence([&] { device->download(host, a.slice(1, 0, 2)); }), "");
  EXPECT_NE(sentence([&] { device->upload(a.slice(1, 0, 2), host); }), "");
  EXPECT_THROW(make(-1), UsageError);
}

// The same calls on a dry device find the work and the scratch; a device with just that scratch runs them, one with
// less says which operation.
TEST_P(Memory, ADryRunFindsTheScratch) {
  const auto step = [&](Device& device) {
    const Tensor dx = device.allocate(Kind::activations, DType::float32, {1000, 48}),
                 dy = device.allocate(Kind::activations, dtype(), {1000, 48}),
                 dbias = device.allocate(Kind::gradients, DType::float32, {48});
    device.residual_backward(dy, dbias, dx, {}, Write::overwrite);
    device.residual_backward(dy.slice(0, 0, 10), dbias, dx.slice(0, 0, 10), {}, Write::overwrite);
  };
  std::vector<double> dry_work, wet_work;  // flops and bytes of each operation
  const auto dry = make(2, true), wet = make(), exact = make(), tight = make();
  dry->trace([&](const Operation& o) { dry_work.insert(dry_work.end(), {o.flops, o.bytes}); });
  wet->trace([&](const Operation& o) { wet_work.insert(wet_work.end(), {o.flops, o.bytes}); });
  step(*dry);
  step(*wet);
  EXPECT_EQ(dry_work.size(), 4u);
  EXPECT_EQ(dry_work, wet_work);
  const std::int64_t scratch = dry->memory()[static_cast<int>(Kind::kernel_scratch)];
  EXPECT_GT(scratch, 0);
  EXPECT_EQ(dry->memory(), wet->memory());
  exact->reserve_scratch(scratch);
  step(*exact);
  EXPECT_EQ(exact->memory(), dry->memory());
  tight->reserve_scratch(scratch - 1);
  EXPECT_EQ(sentence([&] { step(*tight); }),
            str("residual_backward needs ", scratch, " bytes of scratch, but the dry run found ", scratch - 1));
}

TEST_P(Memory, OperationsAreReportedWhileTraced) {
  for (const bool dry : {false, true}) {
    const auto device = make(2, dry);
    const Tensor t = device->allocate(Kind::workspace, dtype(), {100000});
    std::vector<Operation> seen;
    device->trace([&](const Operation& o) { seen.push_back(o); });
    device->fill(t, 1);
    device->copy(t, t);
    device->trace({});
    device->fill(t, 1);
    ASSERT_EQ(seen.size(), 2u);
    EXPECT_STREQ(seen[0].name, "fill");
    EXPECT_STREQ(seen[1].name, "copy");
    EXPECT_GT(seen[0].end, seen[0].begin);
    EXPECT_GE(seen[1].begin, seen[0].end);
    EXPECT_EQ(seen[0].bytes, static_cast<double>(t.bytes()));
  }
}

TEST(MemorySlow, BandwidthIsMeasured) {
  EXPECT_GT(make_cpu_device(0, false)->peak_bandwidth(), 1e8);
}

}  // namespace
}  // namespace onescale::contract

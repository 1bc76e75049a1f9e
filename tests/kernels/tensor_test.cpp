// Views: shapes, strides, and the sentences where they do not fit.
#include "kernels/tensor.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "tests/kernels/contract.h"

namespace onescale {
namespace {

using contract::sentence;

struct Numbers {
  std::array<float, 24> data{};
  Numbers() { std::iota(data.begin(), data.end(), 0.0f); }
  Tensor tensor() { return Tensor(data.data(), DType::float32, {2, 3, 4}); }
};

float at(const Tensor& t, std::initializer_list<std::int64_t> index) {
  std::int64_t offset = 0;
  std::size_t axis = 0;
  for (const std::int64_t i : index) offset += i * t.stride[axis++];
  return t.as<float>()[offset];
}

TEST(Tensor, IsRowMajor) {
  Numbers numbers;
  const Tensor t = numbers.tensor();
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.numel(), 24);
  EXPECT_EQ(t.bytes(), 96);
  EXPECT_EQ(t.dim(-1), 4);
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(at(t, {1, 2, 3}), 23);
  EXPECT_EQ(t.describe(), "float32 [2, 3, 4]");
}

TEST(Tensor, EmptyIsNotTheSameAsWithoutElements) {
  EXPECT_TRUE(Tensor().empty());
  EXPECT_EQ(Tensor().numel(), 0);
  const Tensor none(nullptr, DType::int32, {0, 5});
  EXPECT_FALSE(none.empty());
  EXPECT_EQ(none.numel(), 0);
}

TEST(Tensor, SliceSharesTheData) {
  Numbers numbers;
  const Tensor t = numbers.tensor(), last = t.slice(-1, 1, 3), middle = t.slice(1, 1, 2);
  EXPECT_EQ(last.describe(), "float32 [2, 3, 2]");
  EXPECT_FALSE(last.contiguous());
  EXPECT_EQ(at(last, {1, 2, 1}), 22);
  EXPECT_EQ(at(middle, {1, 0, 3}), 19);
  EXPECT_TRUE(t.slice(0, 1, 2).contiguous());
  EXPECT_EQ(t.slice(0, 1, 1).numel(), 0);
}

TEST(Tensor, SliceWithoutDataKeepsItsShape) {
  const Tensor t = Tensor(nullptr, DType::bfloat16, {5, 6}).slice(0, 2, 5);
  EXPECT_EQ(t.data, nullptr);
  EXPECT_EQ(t.describe(), "bfloat16 [3, 6]");
}

TEST(Tensor, ViewsAndSplits) {
  Numbers numbers;
  const Tensor t = numbers.tensor();
  EXPECT_EQ(at(t.view({6, -1}), {5, 3}), 23);
  EXPECT_EQ(t.view({-1}).describe(), "float32 [24]");
  // The last axis of a slice split into heads: strides stay those of the whole.
  const Tensor heads = t.slice(-1, 0, 4).split_last(2, 2);
  EXPECT_EQ(at(heads, {1, 2, 1, 0}), 22);
  const Tensor part = t.view({6, 4}).slice(1, 1, 3).split_first(2, 3);
  EXPECT_EQ(part.describe(), "float32 [2, 3, 2]");
  EXPECT_EQ(at(part, {1, 1, 1}), 18);
}

TEST(Tensor, SaysWhatDoesNotFit) {
  Numbers numbers;
  const Tensor t = numbers.tensor();
  EXPECT_EQ(sentence([&] {
              Tensor(nullptr, DType::float32, {2}).view({-1, -1});
            }),
            "float32 [2] cannot be viewed as float32 [2, 2]");
  EXPECT_EQ(sentence([&] { t.view({5, 5}); }), "float32 [2, 3, 4] cannot be viewed as float32 [5, 5]");
  EXPECT_EQ(sentence([&] { t.view({5, -1}); }), "float32 [2, 3, 4] cannot be viewed as float32 [5, 4]");
  EXPECT_NE(sentence([&] { t.slice(1, 2, 4); }), "");
  EXPECT_NE(sentence([&] { t.slice(1, 2, 3).view({-1}); }), "");
  EXPECT_NE(sentence([&] { t.split_last(3, 2); }), "");
  EXPECT_NE(sentence([] { Tensor(nullptr, DType::float32, {1, 1, 1, 1, 1}); }), "");
}

}  // namespace
}  // namespace onescale

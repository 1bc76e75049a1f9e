// What the contract tests share: every suite runs over every device and both activation types, with values given and
// read as float64.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <random>
#include <tuple>

#include "kernels/device.h"
#include "kernels/error.h"

namespace onescale::contract {

using Values = std::vector<double>;
using Indices = std::vector<std::int32_t>;
using Shape = std::initializer_list<std::int64_t>;

struct Backend {
  const char* name;
  std::function<std::unique_ptr<Device>(int threads, bool dry)> make;
};
inline std::vector<Backend> backends() {
  std::vector<Backend> all;
  for (const char* isa : {"v3", "v4"})
    all.push_back({isa, [isa](int threads, bool dry) { return make_cpu_device(threads, dry, isa); }});
  return all;
}
// Suites are made for all levels; those that this processor lacks are skipped.
inline bool absent(const Backend& backend) {
  const std::vector<std::string> levels = cpu_levels();
  return std::find(levels.begin(), levels.end(), backend.name) == levels.end();
}

// A suite over backends.
class Float32Contract : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (absent(GetParam())) GTEST_SKIP() << "this processor has no " << GetParam().name;
  }
  std::unique_ptr<Device> make(int threads = 2, bool dry = false) const { return GetParam().make(threads, dry); }
};
#define FLOAT32_CONTRACT_SUITE(suite)                                                          \
  INSTANTIATE_TEST_SUITE_P(Contract, suite, testing::ValuesIn(onescale::contract::backends()), \
                           [](const auto& info) { return info.param.name; })

// A suite over backends and storage types.
class Contract : public testing::TestWithParam<std::tuple<Backend, DType>> {
 protected:
  void SetUp() override {
    if (absent(std::get<0>(GetParam()))) GTEST_SKIP() << "this processor has no " << std::get<0>(GetParam()).name;
  }
  std::unique_ptr<Device> make(int threads = 2, bool dry = false) const {
    return std::get<0>(GetParam()).make(threads, dry);
  }
  DType dtype() const { return std::get<1>(GetParam()); }
  // Relative L2 error allowed for an output of the activation type: sums of a few thousand float32 terms, or the one
  // rounding of a bfloat16 store (half a unit of the last of its 8 bits).
  double tolerance() const { return dtype() == DType::bfloat16 ? 1.0 / 256 : 1e-5; }
};

inline std::string parameter_name(const testing::TestParamInfo<std::tuple<Backend, DType>>& info) {
  return str(std::get<0>(info.param).name, "_", name_of(std::get<1>(info.param)));
}

#define CONTRACT_SUITE(suite)                                                                                      \
  INSTANTIATE_TEST_SUITE_P(Contract, suite,                                                                        \
                           testing::Combine(testing::ValuesIn(onescale::contract::backends()),                     \
                                            testing::Values(onescale::DType::float32, onescale::DType::bfloat16)), \
                           onescale::contract::parameter_name)

inline float round_bf16(float x) {
  auto bits = std::bit_cast<std::uint32_t>(x);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  return std::bit_cast<float>(bits);
}

// The values that `dtype` stores for these.
inline Values rounded(Values x, DType dtype) {
  for (double& v : x) {
    if (dtype == DType::float32) v = static_cast<float>(v);
    if (dtype == DType::bfloat16) v = round_bf16(static_cast<float>(v));
  }
  return x;
}

// n normal values times `scale`, as `dtype` stores them: a reference starts from the same inputs as the operation.
inline Values randoms(std::int64_t n, unsigned seed, DType dtype = DType::float32, double scale = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(0, scale);
  Values x(static_cast<std::size_t>(n));
  for (double& v : x) v = normal(engine);
  return rounded(std::move(x), dtype);
}

// n integers in [low, high].
inline Indices random_indices(std::int64_t n, std::int32_t low, std::int32_t high, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_int_distribution<std::int32_t> uniform(low, high);
  Indices x(static_cast<std::size_t>(n));
  for (auto& v : x) v = uniform(engine);
  return x;
}

// A new tensor on the device with these values.
inline Tensor put(Device& device, DType dtype, Shape shape, const Values& values) {
  Tensor t = device.allocate(Kind::workspace, dtype, shape);
  check(t.numel() == static_cast<std::int64_t>(values.size()), "put: ", values.size(), " values for ", t.describe());
  const auto upload = [&]<class T>(T) {
    std::vector<T> host(values.size());
    for (std::size_t i = 0; i < host.size(); ++i) {
      if constexpr (std::is_same_v<T, bf16>) {
        host[i].bits =
            static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(round_bf16(static_cast<float>(values[i]))) >> 16);
      } else {
        host[i] = static_cast<T>(values[i]);
      }
    }
    device.upload(t, host.data());
  };
  switch (dtype) {
    case DType::float32:
      upload(float{});
      break;
    case DType::bfloat16:
      upload(bf16{});
      break;
    case DType::float64:
      upload(double{});
      break;
    case DType::int32:
      upload(std::int32_t{});
      break;
    case DType::int64:
      upload(std::int64_t{});
      break;
  }
  return t;
}

inline Tensor put(Device& device, Shape shape, const Indices& values) {
  return put(device, DType::int32, shape, Values(values.begin(), values.end()));
}

// A new tensor full of a value that no operation may let through to its output.
inline Tensor garbage(Device& device, DType dtype, Shape shape) {
  Tensor t = device.allocate(Kind::workspace, dtype, shape);
  return put(device, dtype, shape, Values(static_cast<std::size_t>(t.numel()), 777.0));
}

// The values of a tensor of any strides.
inline Values get(Device& device, Tensor t) {
  if (!t.contiguous()) {
    Tensor whole = device.allocate(Kind::workspace, t.dtype, {t.numel()});
    Tensor shaped = t;
    shaped.data = whole.data;
    std::int64_t step = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      shaped.stride[static_cast<std::size_t>(i)] = step;
      step *= t.dim(i);
    }
    device.copy(shaped, t);
    t = shaped;
  }
  Values values(static_cast<std::size_t>(t.numel()));
  const auto download = [&]<class T>(T) {
    std::vector<T> host(values.size());
    device.download(host.data(), t);
    for (std::size_t i = 0; i < host.size(); ++i) {
      if constexpr (std::is_same_v<T, bf16>) {
        values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(host[i].bits) << 16);
      } else {
        values[i] = static_cast<double>(host[i]);
      }
    }
  };
  switch (t.dtype) {
    case DType::float32:
      download(float{});
      break;
    case DType::bfloat16:
      download(bf16{});
      break;
    case DType::float64:
      download(double{});
      break;
    case DType::int32:
      download(std::int32_t{});
      break;
    case DType::int64:
      download(std::int64_t{});
      break;
  }
  return values;
}

// |got - want| / |want| in the L2 norm over the whole tensor; |got| when want is 0. NaN anywhere gives NaN, which no
// tolerance admits.
inline double relative_error(const Values& got, const Values& want) {
  check(got.size() == want.size(), "relative_error: ", got.size(), " values against ", want.size());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error) / (norm > 0 ? std::sqrt(norm) : 1);
}

// The gradient of a scalar function by central differences in float64. The step balances truncation (h^2) and rounding
// (1e-16 / h).
inline Values numeric_gradient(const std::function<double(const Values&)>& f, Values x, double h = 1e-5) {
  Values gradient(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + h;
    const double above = f(x);
    x[i] = at - h;
    gradient[i] = (above - f(x)) / (2 * h);
    x[i] = at;
  }
  return gradient;
}

inline double dot(const Values& a, const Values& b) {
  double s = 0;
  for (std::size_t i = 0; i < a.size(); ++i) s += a[i] * b[i];
  return s;
}

// Whether element `feature` of a token is kept, straight from the definition.
inline bool kept(const Dropout& d, std::int64_t row, std::int64_t position, std::int64_t feature) {
  const Philox words =
      philox(dropout_counter(d.site, d.layer, d.step, row, position, static_cast<std::uint32_t>(feature / 4)), d.seed);
  return words[static_cast<std::size_t>(feature % 4)] >= drop_threshold(d.p);
}

// The sentence that an operation throws, "" when it throws none.
inline std::string sentence(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace onescale::contract

// The reference numbers of tests/fixtures/golden, made with transformers in float64 (see its README).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/levels.h"
#include "train/session.h"

namespace onescale {

struct Golden {
  explicit Golden(const std::string& name)
      : dir(std::string(FIXTURES) + "/golden/" + name), source(dir), expect(dir + "/expect.safetensors") {}

  static std::vector<std::int32_t> ids(const SafetensorsReader& file, const std::string& name) {
    const StoredTensor& t = file.at(name);
    std::vector<std::int64_t> wide(static_cast<std::size_t>(t.numel()));
    file.read(t, 0, t.numel(), wide.data());
    return {wide.begin(), wide.end()};
  }
  std::vector<double> values(const std::string& name) const {
    const StoredTensor& t = expect.at(name);
    std::vector<double> v(static_cast<std::size_t>(t.numel()));
    expect.read(t, 0, t.numel(), v.data());
    return v;
  }

  std::string dir;
  ModelSource source;
  SafetensorsReader expect;
};

struct Difference {
  double relative_l2, ratio, norm;  // |x - ref| / |ref|, <x, ref> / <ref, ref>, |ref|
};

inline Difference difference(const std::vector<float>& x, const std::vector<double>& ref) {
  double error = 0, dot = 0, square = 0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    error += (x[i] - ref[i]) * (x[i] - ref[i]);
    dot += x[i] * ref[i];
    square += ref[i] * ref[i];
  }
  return {std::sqrt(error / square), dot / square, std::sqrt(square)};
}

}  // namespace onescale

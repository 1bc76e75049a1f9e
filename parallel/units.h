// The two protocols that hide from the model where parameters and gradients live: weights gather(unit) / release(unit),
// gradients open(unit) / close(unit). A unit's tensors lie flat, one after the other, each start padded to 64 bytes;
// padding stays zero.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/device.h"
#include "parallel/parameter_table.h"

namespace onescale {

// Where each tensor of a table lies in its unit's flat buffer.
struct FlatLayout {
  explicit FlatLayout(const ParameterTable& table);

  std::vector<std::int64_t> offset;          // of each parameter, in elements from the start of its unit
  std::vector<std::size_t> first_parameter;  // of each unit, and one past the end
  std::vector<std::int64_t> unit_numel;      // with padding
};

using Tensors = std::vector<Tensor>;  // of one unit, in table order

// The tensors of `unit` as views of its flat buffer.
Tensors unit_views(const ParameterTable& table, const FlatLayout& layout, int unit, Tensor flat);

// A contiguous stretch of a unit's flat buffer that this process owns: elements [begin, begin + data.numel()).
struct Owned {
  Tensor data;
  std::int64_t begin;
};

// Parameters: float32 masters and, in bfloat16, a compute copy of them; in float32 both are the same memory.
class Weights {
 public:
  virtual ~Weights() = default;
  virtual const Tensors& gather(int unit) = 0;  // what the model multiplies with; valid until release
  virtual void release(int unit) = 0;
  virtual Owned master(int unit) = 0;    // float32, the owned part
  virtual Tensor compute(int unit) = 0;  // bfloat16 copy of the owned part, empty in float32
};

// Gradients, float32. open() hands out the tensors to write and says whether this is their first use in the step;
// close() ends the unit's backward, after which it may be reduced. A tensor that open() asks to overwrite must be
// written whole.
class Gradients {
 public:
  struct Opened {
    const Tensors& tensors;
    Write write;
  };
  virtual ~Gradients() = default;
  virtual void begin_step() = 0;
  virtual Opened open(int unit) = 0;
  virtual void close(int unit) = 0;
  virtual Owned owned(int unit) = 0;  // the reduced gradient of the owned part, after the last close of a step
};

}  // namespace onescale

// The two protocols that hide from the model where parameters and gradients live: weights gather(unit) / release(unit),
// gradients open(unit) / close(unit). A unit's tensors lie flat, one after the other, each start padded to 64 bytes;
// the whole is padded so that the ranks of the shard group own equal, contiguous parts of it. Padding stays zero.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/device.h"
#include "parallel/parameter_table.h"

namespace onescale {

// Where each tensor of a table lies in its unit's flat buffer.
struct FlatLayout {
  explicit FlatLayout(const ParameterTable& table, int shards = 1);

  std::int64_t shard_numel(int unit) const { return unit_numel[static_cast<std::size_t>(unit)] / shards; }

  std::vector<std::int64_t> offset;          // of each parameter, in elements from the start of its unit
  std::vector<std::size_t> first_parameter;  // of each unit, and one past the end
  std::vector<std::int64_t> unit_numel;      // with padding
  int shards;
};

using Tensors = std::vector<Tensor>;  // of one unit, in table order

// The tensors of `unit` as views of its flat buffer; those that stay float32, of a buffer of their own where there is
// one, one after the other in the same order.
Tensors unit_views(const ParameterTable& table, const FlatLayout& layout, int unit, Tensor flat, Tensor float32 = {});
// Elements that stay float32 among the first `end` of the unit's flat buffer.
std::int64_t float32_before(const ParameterTable& table, const FlatLayout& layout, int unit, std::int64_t end);

// A flat buffer cut into equal parts, by the rank of the shard group that owns them.
Tensors shards_of(Tensor flat, int shards);

// Elements [begin, end) of a unit's flat buffer, none where end <= begin.
struct Stretch {
  int unit;
  std::int64_t begin, end;

  std::int64_t numel() const { return std::max(end - begin, std::int64_t{0}); }
};

// What this process owns of a unit: elements [begin, begin + data.numel()) of its flat buffer.
struct Owned {
  Tensor data;
  std::int64_t begin;

  // Of these elements of the unit those that are owned; there may be none.
  Tensor part(const Stretch& elements) const;
};

// Parameters: float32 masters and, in bfloat16, a compute copy of them, of which small tensors stay float32: what
// rounding the weights of a normalisation or a position does reaches every token. In float32 both are the same memory.
class Weights {
 public:
  virtual ~Weights() = default;
  // What the model multiplies with; valid until release. `next`, when it is a unit, is needed soon: it is fetched
  // meanwhile.
  virtual const Tensors& gather(int unit, int next = -1) = 0;
  virtual void release(int unit) = 0;
  virtual Owned master(int unit) = 0;    // float32, the part that this process updates
  virtual Tensor compute(int unit) = 0;  // bfloat16 copy of that part, written with it; empty in float32
  // That part has been written: others may fetch it. Every rank calls it for the same units in the same order.
  virtual void updated(int) {}
};

// Gradients, float32. open() hands out the tensors to write and says whether this is their first use in the step;
// between open and close it may be called again and says the same. close() ends the unit's backward, after which it may
// be reduced. A tensor that open() asks to overwrite must be written whole.
class Gradients {
 public:
  struct Opened {
    const Tensors& tensors;
    Write write;
  };
  virtual ~Gradients() = default;
  // micro_batches: how often each unit will be closed before finish(), the same on every rank.
  virtual void begin_step(std::int64_t micro_batches) = 0;
  virtual Opened open(int unit) = 0;
  virtual void close(int unit) = 0;
  virtual void finish() = 0;          // ends the step's reductions
  virtual Owned owned(int unit) = 0;  // the reduced gradient of the part that this process updates, after finish()
};

}  // namespace onescale

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>

#include "kernels/error.h"
#include "parallel/zero.h"

namespace onescale {

namespace {

// Stages 0 to 2 hold every unit whole: in stage 0 a rank updates all of it, else its part, which the others then fetch.
// In stage 3 a rank holds its part, and units are whole between gather and release, in buffers that they share.
class ZeroWeights final : public Weights {
 public:
  ZeroWeights(Device& device, Mesh& mesh, const Placement& place, const ZeroSettings& settings)
      : dev_(device),
        mesh_(mesh),
        place_(place),
        part_(settings.stage > 0 && mesh.shard->size() > 1),
        shared_(settings.stage == 3 && part_),
        copy_(settings.dtype != DType::float32),
        buffers_(index(place.units())) {
    for (int unit = 0; unit < place.units(); ++unit) {
      Buffer& buffer = buffer_of(unit);
      if (place.buffer_of(unit) == unit || !shared_) {
        buffer.whole = device.allocate(shared_ ? Kind::transient : Kind::parameters, settings.dtype,
                                       {place.flat.unit_numel[index(unit)]});
        if (copy_)
          buffer.float32 = device.allocate(shared_ ? Kind::transient : Kind::parameters, DType::float32,
                                           {float32_before(unit, buffer.whole.numel())});
        buffer.unit = shared_ ? -1 : unit;
      }
      const std::int64_t begin = part_ ? place.owned_begin(unit) : 0;
      const std::int64_t n = part_ ? place.flat.shard_numel(unit) : buffer.whole.numel();
      const Tensor own =
          shared_ ? device.allocate(Kind::parameters, settings.dtype, {n}) : buffer.whole.slice(0, begin, begin + n);
      const Tensor master = copy_ ? device.allocate(Kind::parameters, DType::float32, {n}) : own;
      const std::int64_t first = float32_before(unit, begin), last = float32_before(unit, begin + n);
      const Tensor float32 = !copy_    ? Tensor()
                             : shared_ ? device.allocate(Kind::parameters, DType::float32, {last - first})
                                       : buffer.float32.slice(0, first, last);
      units_.push_back(
          {own, {master, begin}, float32, unit_views(place.table(), place.flat, unit, buffer.whole, buffer.float32)});
    }
  }
  // The memory goes that transfers write to. After a failure nobody may be there to wait for; a failure here ends the
  // process, which must not go on with memory that others still write to.
  ~ZeroWeights() override {
    if (std::uncaught_exceptions() > 0) return;
    try {
      for (Buffer& buffer : buffers_) settle(buffer);
    } catch (const Error& error) {
      std::fprintf(stderr, "onescale: %s\n", error.what());
      std::_Exit(1);
    }
  }
  ZeroWeights(const ZeroWeights&) = delete;
  ZeroWeights& operator=(const ZeroWeights&) = delete;

  const Tensors& gather(int unit, int next) override {
    fetch(unit);
    Buffer& buffer = buffer_of(unit);
    settle(buffer);
    buffer.used = true;
    if (next >= 0) fetch(next);
    return units_[index(unit)].views;
  }
  void release(int unit) override { buffer_of(unit).used = false; }
  Owned master(int unit) override { return units_[index(unit)].master; }
  Tensor compute(int unit) override { return copy_ ? units_[index(unit)].own : Tensor(); }
  void updated(int unit) override {
    if (copy_) copy_float32(unit);
    if (!part_) return;
    Buffer& buffer = buffer_of(unit);
    if (buffer.unit == unit) buffer.unit = -1;
    if (!shared_) fetch(unit);
  }

 private:
  struct Buffer {
    Tensor whole, float32;
    int unit = -1;  // whose weights it holds or is receiving; -1: none
    bool used = false;
    std::unique_ptr<Transfer> transfer, float32_transfer;
  };

  struct Unit {
    Tensor own;  // this rank's part, or all in stage 0, of what the model multiplies with
    Owned master;
    Tensor float32;  // the same of what the model takes in float32
    Tensors views;
  };

  Buffer& buffer_of(int unit) { return buffers_[index(shared_ ? place_.buffer_of(unit) : unit)]; }
  static void settle(Buffer& buffer) {
    for (auto* transfer : {&buffer.transfer, &buffer.float32_transfer})
      if (*transfer) std::exchange(*transfer, nullptr)->wait();
  }
  std::int64_t float32_before(int unit, std::int64_t end) const {
    return onescale::float32_before(place_.table(), place_.flat, unit, end);
  }
  void copy_float32(int unit) {
    const auto& [own, master, float32, views] = units_[index(unit)];
    const std::int64_t first = float32_before(unit, master.begin);
    for (std::size_t i = place_.flat.first_parameter[index(unit)]; i < place_.flat.first_parameter[index(unit + 1)];
         ++i) {
      const Parameter& p = place_.table().parameters[i];
      const std::int64_t begin = place_.flat.offset[i];
      const Tensor part = master.part({unit, begin, begin + p.numel()});
      if (!p.float32 || part.numel() == 0) continue;
      const std::int64_t at = float32_before(unit, std::max(begin, master.begin)) - first;
      dev_.copy(float32.slice(0, at, at + part.numel()), part);
    }
  }
  void fetch(int unit) {
    Buffer& buffer = buffer_of(unit);
    if (buffer.unit == unit) return;
    check(!buffer.used, "unit ", buffer.unit, " is gathered and not released, while unit ", unit, " needs its buffer");
    settle(buffer);
    buffer.unit = unit;
    const Unit& u = units_[index(unit)];
    const int shards = mesh_.shard->size();
    buffer.transfer = mesh_.shard->all_gather(shards_of(buffer.whole, shards), u.own);
    if (!copy_) return;
    Tensors parts;
    const auto first = [&](int r) { return float32_before(unit, r * place_.flat.shard_numel(unit)); };
    for (int r = 0; r < shards; ++r) parts.push_back(buffer.float32.slice(0, first(r), first(r + 1)));
    buffer.float32_transfer = mesh_.shard->all_gather(parts, u.float32);
  }

  Device& dev_;
  Mesh& mesh_;
  const Placement& place_;
  bool part_, shared_, copy_;  // this rank updates its part; units share buffers; the masters are copies
  std::vector<Buffer> buffers_;
  std::vector<Unit> units_;
};

}  // namespace

std::unique_ptr<Weights> make_weights(Device& device, Mesh& mesh, const Placement& place,
                                      const ZeroSettings& settings) {
  return std::make_unique<ZeroWeights>(device, mesh, place, settings);
}

}  // namespace onescale

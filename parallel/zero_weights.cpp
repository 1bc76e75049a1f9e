#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>

#include "kernels/error.h"
#include "parallel/zero.h"

namespace onescale {

namespace {

std::size_t index(int unit) {
  return static_cast<std::size_t>(unit);
}

// The shards of a unit's flat buffer by their owners.
std::vector<Tensor> shards_of(Tensor flat, int shards) {
  std::vector<Tensor> parts;
  const std::int64_t n = flat.numel() / shards;
  for (int r = 0; r < shards; ++r) parts.push_back(flat.slice(0, r * n, (r + 1) * n));
  return parts;
}

void settle(std::unique_ptr<Transfer>& transfer) {
  if (transfer) std::exchange(transfer, nullptr)->wait();
}

// Before the memory that a transfer writes to goes. After a failure nobody may be there to wait for; a failure here
// ends the process, which must not go on with memory that others still write to.
void settle_at_end(std::unique_ptr<Transfer>& transfer) noexcept {
  if (std::uncaught_exceptions() > 0) return;
  try {
    settle(transfer);
  } catch (const Error& error) {
    std::fprintf(stderr, "onescale: %s\n", error.what());
    std::_Exit(1);
  }
}

// Stages 0 to 2: every rank holds the whole parameters. In stage 0 it updates all of them, else its part, which the
// others then fetch.
class WholeWeights final : public Weights {
 public:
  WholeWeights(Device& device, Mesh& mesh, const Placement& place, const ZeroSettings& settings)
      : mesh_(mesh), place_(place), part_(settings.stage > 0), transfers_(index(place.units())) {
    const bool copy = settings.dtype != DType::float32;
    for (int unit = 0; unit < place.units(); ++unit) {
      const std::int64_t n = place.flat.unit_numel[index(unit)];
      whole_.push_back(device.allocate(Kind::parameters, settings.dtype, {n}));
      master_.push_back(
          copy ? device.allocate(Kind::parameters, DType::float32, {part_ ? place.flat.shard_numel(unit) : n})
               : own(whole_.back(), unit));
      compute_.push_back(copy ? own(whole_.back(), unit) : Tensor());
      views_.push_back(unit_views(place.table(), place.flat, unit, whole_.back()));
    }
  }
  ~WholeWeights() override {
    for (auto& transfer : transfers_) settle_at_end(transfer);
  }
  WholeWeights(const WholeWeights&) = delete;
  WholeWeights& operator=(const WholeWeights&) = delete;
  const Tensors& gather(int unit, int) override {
    settle(transfers_[index(unit)]);
    return views_[index(unit)];
  }
  void release(int) override {}
  Owned master(int unit) override { return {master_[index(unit)], part_ ? place_.owned_begin(unit) : 0}; }
  Tensor compute(int unit) override { return compute_[index(unit)]; }
  void updated(int unit) override {
    if (!part_) return;
    const Tensor whole = whole_[index(unit)];
    settle(transfers_[index(unit)]);
    transfers_[index(unit)] = mesh_.shard->all_gather(shards_of(whole, mesh_.shard->size()), own(whole, unit));
  }

 private:
  Tensor own(Tensor whole, int unit) const {
    return part_ ? whole.slice(0, place_.owned_begin(unit), place_.owned_end(unit)) : whole;
  }

  Mesh& mesh_;
  const Placement& place_;
  bool part_;
  std::vector<Tensor> whole_, master_, compute_;
  std::vector<Tensors> views_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
};

// Stage 3: a rank holds its part; a unit is whole between gather and release. Units of blocks take turns in two
// buffers, so that the next one is fetched while one is used; other units have a buffer each.
class ShardedWeights final : public Weights {
 public:
  ShardedWeights(Device& device, Mesh& mesh, const Placement& place, const ZeroSettings& settings)
      : mesh_(mesh), place_(place) {
    const bool copy = settings.dtype != DType::float32;
    for (int unit = 0; unit < place.units(); ++unit) {
      const std::int64_t n = place.flat.unit_numel[index(unit)];
      master_.push_back(device.allocate(Kind::parameters, DType::float32, {place.flat.shard_numel(unit)}));
      compute_.push_back(copy ? device.allocate(Kind::parameters, settings.dtype, {place.flat.shard_numel(unit)})
                              : Tensor());
      const bool turns = unit > 2 && n == place.flat.unit_numel[index(unit - 2)];
      slot_of_.push_back(turns ? slot_of_[index(unit - 2)] : slots_.size());
      if (!turns) slots_.push_back({device.allocate(Kind::transient, settings.dtype, {n}), -1, false, nullptr});
      views_.push_back(unit_views(place.table(), place.flat, unit, slots_[slot_of_.back()].flat));
    }
  }
  ~ShardedWeights() override {
    for (Slot& slot : slots_) settle_at_end(slot.transfer);
  }
  ShardedWeights(const ShardedWeights&) = delete;
  ShardedWeights& operator=(const ShardedWeights&) = delete;
  const Tensors& gather(int unit, int next) override {
    fetch(unit);
    Slot& slot = slots_[slot_of_[index(unit)]];
    settle(slot.transfer);
    slot.used = true;
    if (next >= 0) fetch(next);
    return views_[index(unit)];
  }
  void release(int unit) override { slots_[slot_of_[index(unit)]].used = false; }
  Owned master(int unit) override { return {master_[index(unit)], place_.owned_begin(unit)}; }
  Tensor compute(int unit) override { return compute_[index(unit)]; }
  void updated(int unit) override {
    Slot& slot = slots_[slot_of_[index(unit)]];
    settle(slot.transfer);
    if (slot.unit == unit) slot.unit = -1;
  }

 private:
  struct Slot {
    Tensor flat;
    int unit;  // whose weights it holds or is receiving; -1: none
    bool used;
    std::unique_ptr<Transfer> transfer;
  };

  void fetch(int unit) {
    Slot& slot = slots_[slot_of_[index(unit)]];
    if (slot.unit == unit) return;
    check(!slot.used, "unit ", slot.unit, " is gathered and not released, while unit ", unit, " needs its buffer");
    settle(slot.transfer);
    slot.unit = unit;
    const Tensor own = compute_[index(unit)].empty() ? master_[index(unit)] : compute_[index(unit)];
    slot.transfer = mesh_.shard->all_gather(shards_of(slot.flat, mesh_.shard->size()), own);
  }

  Mesh& mesh_;
  const Placement& place_;
  std::vector<Tensor> master_, compute_;
  std::vector<std::size_t> slot_of_;
  std::vector<Slot> slots_;
  std::vector<Tensors> views_;
};

}  // namespace

std::unique_ptr<Weights> make_weights(Device& device, Mesh& mesh, const Placement& place,
                                      const ZeroSettings& settings) {
  if (settings.stage == 3 && mesh.shard->size() > 1)
    return std::make_unique<ShardedWeights>(device, mesh, place, settings);
  ZeroSettings whole = settings;
  if (mesh.shard->size() == 1) whole.stage = 0;
  return std::make_unique<WholeWeights>(device, mesh, place, whole);
}

}  // namespace onescale

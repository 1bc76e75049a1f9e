#include "kernels/error.h"
#include "parallel/tp_gradients.h"
#include "parallel/zero.h"

namespace onescale {

namespace {

std::size_t index(int unit) {
  return static_cast<std::size_t>(unit);
}

std::int64_t all_columns(const Placement& place) {
  std::int64_t columns = 0;
  for (int unit = 0; unit < place.units(); ++unit) columns += place.flat.shard_numel(unit);
  return columns;
}

// Stages 0 and 1: whole gradients are added up over the step's micro-batches and reduced once, while the last one's
// backward goes on. In stage 0 every rank then receives the whole sum, in stage 1 its part.
class WholeGradients final : public Gradients {
 public:
  WholeGradients(Device& device, Mesh& mesh, const Placement& place, const ZeroSettings& settings)
      : mesh_(mesh),
        place_(place),
        part_(settings.stage > 0),
        all_reduce_(settings.reduction.kind == Reduction::all_reduce),
        tp_(device, mesh, place, settings.reduction.kind, !part_ && (all_reduce_ || mesh.shard->size() == 1)),
        closed_(index(place.units())) {
    for (int unit = 0; unit < place.units(); ++unit) {
      whole_.push_back(device.allocate(Kind::gradients, DType::float32, {place.flat.unit_numel[index(unit)]}));
      views_.push_back(unit_views(place.table(), place.flat, unit, whole_.back()));
    }
    if (mesh.shard->size() > 1) reducer_.emplace(device, *mesh.shard, settings.reduction, all_columns(place));
  }
  void begin_step(std::int64_t micro_batches) override {
    micro_batches_ = micro_batches;
    closed_.assign(closed_.size(), 0);
  }
  Opened open(int unit) override {
    return {views_[index(unit)], closed_[index(unit)] > 0 ? Write::accumulate : Write::overwrite};
  }
  void close(int unit) override {
    const bool last = ++closed_[index(unit)] == micro_batches_;
    if (last && reducer_)
      reducer_->add(whole_[index(unit)], !part_ && all_reduce_ ? whole_[index(unit)] : own(unit), Write::overwrite);
  }
  void finish() override {
    if (reducer_) reducer_->finish();
    std::vector<Owned> reduced;
    for (int unit = 0; unit < place_.units(); ++unit) {
      reduced.push_back(!part_ && (all_reduce_ || !reducer_) ? Owned{whole_[index(unit)], 0}
                                                             : Owned{own(unit), place_.owned_begin(unit)});
    }
    tp_.finish(reduced);
    if (part_ || all_reduce_ || !reducer_) return;
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (int unit = 0; unit < place_.units(); ++unit) {
      std::vector<Tensor> parts;
      const std::int64_t n = place_.flat.shard_numel(unit);
      for (int r = 0; r < mesh_.shard->size(); ++r) parts.push_back(whole_[index(unit)].slice(0, r * n, (r + 1) * n));
      transfers.push_back(mesh_.shard->all_gather(parts, own(unit)));
    }
    for (auto& transfer : transfers) transfer->wait();
  }
  Owned owned(int unit) override {
    return part_ ? Owned{own(unit), place_.owned_begin(unit)} : Owned{whole_[index(unit)], 0};
  }

 private:
  Tensor own(int unit) const { return whole_[index(unit)].slice(0, place_.owned_begin(unit), place_.owned_end(unit)); }

  Mesh& mesh_;
  const Placement& place_;
  bool part_, all_reduce_;
  TpGradients tp_;
  std::vector<Tensor> whole_;
  std::vector<Tensors> views_;
  std::vector<std::int64_t> closed_;
  std::int64_t micro_batches_ = 1;
  std::optional<Reducer> reducer_;
};

// Stages 2 and 3: a unit's gradient is whole from open to close, then its sum over ranks is added to the part that this
// rank owns. Units of blocks take turns in two buffers, so that one is reduced while the next is written; other units
// have a buffer each.
class ShardedGradients final : public Gradients {
 public:
  ShardedGradients(Device& device, Mesh& mesh, const Placement& place, const ZeroSettings& settings)
      : place_(place),
        tp_(device, mesh, place, settings.reduction.kind, false),
        reducer_(device, *mesh.shard, settings.reduction, all_columns(place)),
        closed_(index(place.units())) {
    for (int unit = 0; unit < place.units(); ++unit) {
      const std::int64_t n = place.flat.unit_numel[index(unit)];
      shard_.push_back(device.allocate(Kind::gradients, DType::float32, {place.flat.shard_numel(unit)}));
      const bool turns = unit > 2 && n == place.flat.unit_numel[index(unit - 2)];
      buffer_.push_back(turns ? buffer_[index(unit - 2)] : device.allocate(Kind::transient, DType::float32, {n}));
      views_.push_back(unit_views(place.table(), place.flat, unit, buffer_.back()));
    }
  }
  void begin_step(std::int64_t) override { closed_.assign(closed_.size(), 0); }
  Opened open(int unit) override {
    reducer_.settle(buffer_[index(unit)]);
    return {views_[index(unit)], Write::overwrite};
  }
  void close(int unit) override {
    reducer_.add(buffer_[index(unit)], shard_[index(unit)],
                 closed_[index(unit)]++ > 0 ? Write::accumulate : Write::overwrite);
  }
  void finish() override {
    reducer_.finish();
    std::vector<Owned> reduced;
    for (int unit = 0; unit < place_.units(); ++unit) reduced.push_back(owned(unit));
    tp_.finish(reduced);
  }
  Owned owned(int unit) override { return {shard_[index(unit)], place_.owned_begin(unit)}; }

 private:
  const Placement& place_;
  TpGradients tp_;
  Reducer reducer_;
  std::vector<Tensor> shard_, buffer_;
  std::vector<Tensors> views_;
  std::vector<std::int64_t> closed_;
};

}  // namespace

std::unique_ptr<Gradients> make_gradients(Device& device, Mesh& mesh, const Placement& place,
                                          const ZeroSettings& settings) {
  if (settings.stage >= 2 && mesh.shard->size() > 1)
    return std::make_unique<ShardedGradients>(device, mesh, place, settings);
  ZeroSettings whole = settings;
  if (mesh.shard->size() == 1) whole.stage = 0;
  return std::make_unique<WholeGradients>(device, mesh, place, whole);
}

}  // namespace onescale

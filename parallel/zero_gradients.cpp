#include <numeric>
#include <optional>

#include "parallel/tensor_parallel.h"
#include "parallel/zero.h"

namespace onescale {

namespace {

// What tensor parallelism asks of gradients that are reduced over the shard group: the K/V rows' are summed over tp in
// rank order; and all copies of a replicated element hold the same bits, after a library's reduction, whose order may
// differ between ranks, those of tp rank 0.
class TpGradients {
 public:
  // whole: the gradients given to finish() are whole units instead of this rank's part.
  TpGradients(Device& device, Mesh& mesh, const Placement& place, Reduction reduction, bool whole)
      : dev_(device), tp_(*mesh.tp) {
    std::int64_t partial = 0;
    for (std::size_t i = 0; tp_.size() > 1 && i < place.table().parameters.size(); ++i) {
      const std::int64_t offset = place.flat.offset[i], real = place.slices.real(i);
      const auto owned = [&](std::int64_t from) {
        return whole ? Stretch{place.table().parameters[i].unit, offset + from, offset + real}
                     : place.owned(i, from, real);
      };
      const Stretch rows = owned(place.slices.partial_from(i)), copies = owned(place.slices.replicated_from(i));
      partial += rows.numel();
      if (rows.numel() > 0) partial_.push_back(rows);
      if (copies.numel() > 0 && reduction != Reduction::ordered) replicated_.push_back(copies);
    }
    if (partial == 0) return;
    rows_ = device.allocate(Kind::transient, DType::float32, {partial});
    sum_.emplace(device, tp_, partial);
  }

  void finish(const std::vector<Owned>& gradients) const {
    const auto each_partial = [&](const auto& copy) {  // copy(gradient, its place in rows_)
      std::int64_t at = 0;
      for (const Stretch& rows : partial_) {
        copy(gradients[index(rows.unit)].part(rows), rows_.slice(0, at, at + rows.numel()));
        at += rows.numel();
      }
    };
    each_partial([&](Tensor gradient, Tensor row) { dev_.copy(row, gradient); });
    if (sum_) sum_->all_reduce(rows_);
    each_partial([&](Tensor gradient, Tensor row) { dev_.copy(gradient, row); });
    for (const Stretch& copies : replicated_) tp_.broadcast(gradients[index(copies.unit)].part(copies), 0)->wait();
  }

 private:
  Device& dev_;
  Communicator& tp_;
  std::vector<Stretch> partial_, replicated_;
  Tensor rows_;
  std::optional<TensorParallel> sum_;
};

// Stages 0 and 1 add whole gradients up over the step's micro-batches and reduce them once, while the last one's
// backward goes on; in stage 0 every rank then receives the whole sum, in stage 1 its part. In stages 2 and 3 a unit's
// gradient is whole from open to close, in buffers that units share; then its sum over ranks is added to the part that
// this rank owns.
class ZeroGradients final : public Gradients {
 public:
  ZeroGradients(Device& device, Mesh& mesh, const Placement& place, const ZeroSettings& settings)
      : mesh_(mesh),
        part_(settings.stage > 0 && mesh.shard->size() > 1),
        each_(settings.stage > 1 && part_),
        whole_sum_(!part_ && (settings.reduction.kind == Reduction::all_reduce || mesh.shard->size() == 1)),
        tp_(device, mesh, place, settings.reduction.kind, whole_sum_),
        reducer_(device, *mesh.shard, settings.reduction,
                 std::accumulate(place.flat.unit_numel.begin(), place.flat.unit_numel.end(), std::int64_t{0}) /
                     place.layout.shards()) {
    for (int unit = 0; unit < place.units(); ++unit) {
      const bool turns = each_ && place.buffer_of(unit) != unit;
      const Tensor buffer = turns ? units_[index(place.buffer_of(unit))].buffer
                                  : device.allocate(each_ ? Kind::transient : Kind::gradients, DType::float32,
                                                    {place.flat.unit_numel[index(unit)]});
      const std::int64_t begin = whole_sum_ ? 0 : place.owned_begin(unit);
      const Tensor sum = each_        ? device.allocate(Kind::gradients, DType::float32, {place.flat.shard_numel(unit)})
                         : whole_sum_ ? buffer
                                      : buffer.slice(0, begin, place.owned_end(unit));
      units_.push_back({buffer, {sum, begin}, unit_views(place.table(), place.flat, unit, buffer)});
    }
  }
  void begin_step(std::int64_t micro_batches) override {
    micro_batches_ = micro_batches;
    for (Unit& unit : units_) unit.closed = 0;
  }
  Opened open(int unit) override {
    const Unit& u = units_[index(unit)];
    reducer_.settle(u.buffer);
    return {u.views, !each_ && u.closed > 0 ? Write::accumulate : Write::overwrite};
  }
  void close(int unit) override {
    Unit& u = units_[index(unit)];
    ++u.closed;
    if (each_ || u.closed == micro_batches_)
      reducer_.add(u.buffer, u.sum.data, each_ && u.closed > 1 ? Write::accumulate : Write::overwrite);
  }
  void finish() override {
    reducer_.finish();
    std::vector<Owned> sums;
    for (const Unit& unit : units_) sums.push_back(unit.sum);
    tp_.finish(sums);
    if (part_ || whole_sum_) return;
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (const Unit& unit : units_)
      transfers.push_back(mesh_.shard->all_gather(shards_of(unit.buffer, mesh_.shard->size()), unit.sum.data));
    for (auto& transfer : transfers) transfer->wait();
  }
  Owned owned(int unit) override { return part_ ? units_[index(unit)].sum : Owned{units_[index(unit)].buffer, 0}; }

 private:
  struct Unit {
    Tensor buffer;
    Owned sum;  // over ranks
    Tensors views;
    std::int64_t closed = 0;  // times in this step
  };

  Mesh& mesh_;
  bool part_, each_, whole_sum_;  // this rank updates its part; each micro-batch is reduced; ranks receive whole sums
  TpGradients tp_;
  Reducer reducer_;
  std::vector<Unit> units_;
  std::int64_t micro_batches_ = 1;
};

}  // namespace

std::unique_ptr<Gradients> make_gradients(Device& device, Mesh& mesh, const Placement& place,
                                          const ZeroSettings& settings) {
  return std::make_unique<ZeroGradients>(device, mesh, place, settings);
}

}  // namespace onescale

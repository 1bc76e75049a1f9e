// Memory of a rank and the collectives of a step in closed form, against what a step does on recording groups.
#include <gtest/gtest.h>

#include <numeric>

#include "train/step.h"

namespace onescale {
namespace {

constexpr std::int64_t V = 27, P = 20, C = 32, L = 4, H = 8, d = 4, I = 24, T = 16, B = 2;

struct Planned {
  Planned(const Layout& layout, const StepSettings& settings, bool multi_query, std::int64_t micro_batches)
      : mesh(Mesh::recording(layout)), device(make_cpu_device(1, true)) {
    ModelConfig config{.vocab_size = V, .n_positions = P, .n_embd = C, .n_layer = L, .n_head = H, .n_inner = I};
    config.multi_query = multi_query;
    ModelWeights weights(*device, *mesh, config, settings.zero);
    Step step(weights, settings);
    for (Communicator* group : mesh->groups()) group->reset_traffic();
    step.run_empty(micro_batches);
  }
  std::int64_t memory(Kind kind) const { return device->memory()[static_cast<std::size_t>(kind)]; }
  std::unique_ptr<Mesh> mesh;
  std::unique_ptr<Device> device;
};

StepSettings settings(int stage, Reduction reduction = Reduction::ordered, DType dtype = DType::float32) {
  StepSettings s;
  s.micro_batch = B, s.seq_len = T;
  s.zero = {stage, {reduction, 1024, DType::float32}, dtype};
  s.optimizer.adamw = true;
  return s;
}

std::int64_t up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

// Elements of the tensors of each unit on a tp rank.
std::vector<std::vector<std::int64_t>> tensors(int tp) {
  const std::int64_t qkv = C / tp + 2 * d, i = I / tp;
  std::vector<std::vector<std::int64_t>> all{{up(V, tp) / tp * C, P * C}};
  all.insert(all.end(), L, {C, C, qkv * C, qkv, C * (C / tp), C, C, C, i * C, i, C * i, C});
  all.push_back({C, C});
  return all;
}
// Elements of each unit: every tensor padded to 16, the whole to 16 a shard.
std::vector<std::int64_t> units(int tp, int shards) {
  std::vector<std::int64_t> all;
  for (const auto& unit : tensors(tp)) {
    std::int64_t n = 0;
    for (const std::int64_t t : unit) n += up(t, 16);
    all.push_back(up(n, 16 * shards));
  }
  return all;
}
// Elements of each unit, from shard `first` on, that a bfloat16 model takes in float32: vectors and positions.
std::vector<std::int64_t> float32_units(int tp, int shards, int first) {
  std::vector<std::int64_t> all;
  for (const auto& unit : tensors(tp)) {
    std::int64_t offset = 0, kept = 0;
    const std::int64_t begin = first * (units(tp, shards)[all.size()] / shards);
    for (const std::int64_t t : unit) {
      const bool vector = t == C || t == I / tp || t == C / tp + 2 * d, positions = all.empty() && offset > 0;
      if (vector || positions) kept += std::clamp(offset + t - begin, std::int64_t{0}, t);
      offset += up(t, 16);
    }
    all.push_back(kept);
  }
  return all;
}
std::int64_t total(const std::vector<std::int64_t>& n) {
  return std::accumulate(n.begin(), n.end(), std::int64_t{0});
}

using Operations = std::map<std::string, Traffic::Count>;

// stage  parameters  gradients  optimizer state, of whole or part
TEST(Theory, BytesOfARank) {
  for (const Layout& layout : {Layout{4, 1, 1, 0}, Layout{2, 2, 1, 3}, Layout{3, 1, 2, 5}, Layout{1, 1, 4, 1}}) {
    const std::int64_t whole = total(units(layout.tp, layout.shards())), part = whole / layout.shards();
    for (int stage = 0; stage < 4; ++stage) {
      const Planned f32(layout, settings(stage), true, 1);
      const Planned half(layout, settings(stage, Reduction::ordered, DType::bfloat16), true, 1);
      const std::int64_t parameters = stage == 3 ? part : whole, gradients = stage >= 2 ? part : whole,
                         state = stage >= 1 ? part : whole;
      EXPECT_EQ(f32.memory(Kind::parameters), 4 * parameters) << layout.text() << " zero " << stage;
      const int rank = stage == 3 ? layout.shard_rank() : 0, end = stage == 3 ? rank + 1 : layout.shards();
      const std::int64_t kept = total(float32_units(layout.tp, layout.shards(), rank)) -
                                total(float32_units(layout.tp, layout.shards(), end));
      EXPECT_EQ(half.memory(Kind::parameters), 2 * parameters + 4 * kept + 4 * state)
          << layout.text() << " zero " << stage;
      for (const Planned* plan : {&f32, &half}) {
        EXPECT_EQ(plan->memory(Kind::gradients), 4 * gradients) << layout.text() << " zero " << stage;
        EXPECT_EQ(plan->memory(Kind::optimizer), 2 * 4 * state) << layout.text() << " zero " << stage;
      }
    }
  }
}

// What travels in the shard group: gradients once a step or once a micro-batch, (W - 1) / W of their bytes when every
// rank receives its part and twice that when all receive all; then weights, or in stage 0 the summed gradients.
TEST(Theory, CollectivesOfTheShardGroup) {
  for (const std::int64_t M : {1, 3}) {
    for (const int W : {2, 4}) {
      const std::vector<std::int64_t> n = units(1, W);
      const std::int64_t others = W - 1, part = total(n) / W;
      for (int stage = 0; stage < 4; ++stage) {
        for (const DType dtype : {DType::float32, DType::bfloat16}) {
          for (const Reduction kind : {Reduction::ordered, Reduction::reduce_scatter, Reduction::all_reduce}) {
            const bool all = kind == Reduction::all_reduce;
            const Planned plan({W, 1, 1, W - 1}, settings(stage, kind, dtype), true, M);
            const Operations& did = plan.mesh->shard->traffic().operations;
            const char* name = all ? "all_reduce" : kind == Reduction::ordered ? "all_to_all" : "reduce_scatter";
            const std::int64_t times = stage >= 2 ? M : 1;
            EXPECT_EQ(did.at(name).bytes, times * (all ? 2 : 1) * 4 * part * others) << stage << name << W << M;
            EXPECT_GE(did.at(name).calls, 1);
            EXPECT_LE(did.at(name).calls, 2 * times);  // of one bucket that is sent when half full
            EXPECT_EQ(did.at("exchange"), (Traffic::Count{1, 8 * others}));  // the loss

            Traffic::Count gathers{static_cast<std::int64_t>(n.size()), size_of(dtype) * part * others};
            const std::vector<std::int64_t> kept = float32_units(1, W, W - 1);  // that this rank, the last, sends
            if (dtype == DType::bfloat16) gathers = {2 * gathers.calls, gathers.bytes + 4 * total(kept) * others};
            if (stage == 0) gathers = all ? Traffic::Count{0, 0} : Traffic::Count{std::ssize(n), 4 * part * others};
            if (stage == 3) {
              // Two buffers for L blocks: each pass forth or back over them fetches those that are not still there.
              const std::int64_t fetches = L + (2 * M - 1) * (L - 2);
              gathers = {2 + fetches, size_of(dtype) * others * (n.front() + n.back() + fetches * n[1]) / W};
              if (dtype == DType::bfloat16) {
                gathers.calls *= 2;
                gathers.bytes += 4 * others * (kept.front() + kept.back() + fetches * kept[1]);
              }
            }
            EXPECT_EQ(did.contains("all_gather") ? did.at("all_gather") : Traffic::Count{}, gathers)
                << "zero " << stage << " " << name << " W " << W << " M " << M;
            EXPECT_EQ(plan.mesh->dp->traffic().operations.at("exchange"), (Traffic::Count{1, 16 * others}));
            EXPECT_EQ(plan.mesh->world.traffic().operations, (Operations{{"exchange", {1, 8 * others}}}));
          }
        }
      }
    }
  }
}

// Every bucket size moves the same bytes; one column a bucket is one call for every element of a part.
TEST(Theory, BucketsMoveTheSameBytes) {
  const int W = 4;
  const std::int64_t part = total(units(1, W)) / W;
  for (int stage = 0; stage < 4; ++stage) {
    for (const std::int64_t columns : {std::int64_t{1}, std::int64_t{100}, part}) {
      StepSettings s = settings(stage);
      s.zero.reduction.bucket_mb = static_cast<double>(columns * W * 4) / 1048576;
      const Planned plan({W, 1, 1, 0}, s, true, 1);
      const Traffic::Count did = plan.mesh->shard->traffic().operations.at("all_to_all");
      EXPECT_EQ(did.bytes, 4 * part * (W - 1));
      EXPECT_GE(did.calls, part / columns);
      EXPECT_TRUE(columns > 1 || did.calls == part);
    }
  }
}

// ulysses moves four times the heads of a shard, and K and V of one head gathered and reduced, or with all heads forth
// and back; gather_kv moves K and V alone. The backward pass gathers K and V again, but those of the last block are
// still there; recomputation repeats the forward pass, which leaves them there for every block.
TEST(Theory, CollectivesOfTheSequenceGroup) {
  for (const std::int64_t M : {1, 3}) {
    for (const int sp : {2, 4}) {
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        for (const bool multi_query : {true, false}) {
          for (const bool again : {false, true}) {
            const std::int64_t t = B * T / sp, blocks = M * L, sent = blocks * (sp - 1) * size_of(dtype);
            StepSettings s = settings(0, Reduction::ordered, dtype);
            if (again) s.recompute = Recompute::block;
            const std::int64_t forward = again ? 2 : 1, gathers = 2 * blocks - (again ? 0 : M);
            const std::int64_t gathered = gathers * (sp - 1) * size_of(dtype);
            const std::int64_t heads = t * H / sp * d, kv = t * 2 * d, kv_heads = 2 * heads;
            const Planned by_heads({1, sp, 1, 0}, s, multi_query, M);
            const Operations ulysses =
                multi_query
                    ? Operations{{"all_to_all", {blocks * (2 * forward + 3), sent * (heads * (2 * forward + 2) + kv)}},
                                 {"all_gather", {gathers, gathered * kv}}}
                    : Operations{{"all_to_all",
                                  {blocks * (3 * forward + 3),
                                   sent * (heads * (2 * forward + 2) + kv_heads * (forward + 1))}}};
            EXPECT_EQ(by_heads.mesh->sp->traffic().operations, ulysses) << sp << M << multi_query << again;

            s.sp_mode = SpMode::gather_kv;
            const Planned by_keys({1, sp, 1, 0}, s, multi_query, M);
            const std::int64_t keys = multi_query ? kv : kv * H;
            EXPECT_EQ(by_keys.mesh->sp->traffic().operations,
                      (Operations{{"all_to_all", {blocks, sent * keys}}, {"all_gather", {gathers, gathered * keys}}}))
                << sp << M << multi_query << again;
          }
        }
      }
    }
  }
}

// Activations [n, C] are summed after the embedding, in float32, twice a block forth and twice back, and once at the
// head, each as an exchange of parts and a gather; three statistics a token for the softmax; K/V rows' gradients once a
// step.
TEST(Theory, CollectivesOfTheTensorGroup) {
  for (const std::int64_t M : {1, 3}) {
    for (const int tp : {2, 4}) {
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        for (const bool multi_query : {true, false}) {
          const std::int64_t n = B * T, others = tp - 1, sums = M * (4 * L + 2);
          const std::int64_t activations = ((sums - M) * size_of(dtype) + M * 4) * n * C / tp * others;
          const std::int64_t kv = multi_query ? L * (2 * d * C + 2 * d) / tp * 4 * others : 0,
                             once = multi_query ? 1 : 0;
          const Planned plan({1, 1, tp, 0}, settings(0, Reduction::ordered, dtype), multi_query, M);
          EXPECT_EQ(plan.mesh->tp->traffic().operations,
                    (Operations{{"all_to_all", {sums + once, activations + kv}},
                                {"all_gather", {sums + once + M, activations + kv + M * n * 3 * 4 * others}}}))
              << tp << M << multi_query;
          EXPECT_EQ(plan.mesh->shard->traffic().operations.at("exchange").bytes, 0);
        }
      }
    }
  }
}

// After a library's reduction, whose order of additions may differ, tp rank 0 sends its replicated elements: positions,
// eight tensors a block and two of the last normalisation.
TEST(Theory, CopiesTakeTheBitsOfOneRank) {
  const std::int64_t block = 2 * C + (2 * d * C + 2 * d) + C + 2 * C + C;
  for (const Reduction kind : {Reduction::reduce_scatter, Reduction::all_reduce}) {
    const Planned plan({1, 1, 2, 0}, settings(0, kind), true, 3);
    EXPECT_EQ(plan.mesh->tp->traffic().operations.at("broadcast"),
              (Traffic::Count{1 + 8 * L + 2, 4 * (P * C + L * block + 2 * C)}));
  }
}

}  // namespace
}  // namespace onescale

// Checkpoints over real ranks: what one layout saves any other loads, to the bit; who writes what; a rank that cannot.
#include "train/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "model/parameters.h"
#include "parallel/agreement.h"
#include "tests/ranks/ranks.h"
#include "tests/temp_dir.h"
#include "train/step.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;

// A directory that all ranks see.
class SharedDir {
 public:
  SharedDir() {
    if (ranks().rank() == 0) own_.emplace();
    path_ = exchange_text(ranks().communicator(), own_ ? own_->path() : "")[0];
  }
  ~SharedDir() { ranks().communicator().barrier(); }
  SharedDir(const SharedDir&) = delete;
  SharedDir& operator=(const SharedDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::optional<TempDir> own_;
  std::string path_;
};

// 99 rows of the vocabulary divide by no tp.
ModelConfig config_of(bool multi_query, std::int64_t n_embd = 32, std::int64_t n_layer = 2) {
  ModelConfig c{.vocab_size = 99, .n_positions = 8, .n_embd = n_embd, .n_layer = n_layer, .n_head = 8};
  c.n_inner = 4 * n_embd;
  c.multi_query = multi_query;
  c.bos_token_id = c.eos_token_id = 0;
  return c;
}

struct Way {
  int world, sp, tp, stage;
  DType dtype = DType::float32;
};
constexpr Way ways[] = {{1, 1, 1, 0}, {2, 1, 1, 1}, {2, 2, 1, 3}, {2, 1, 2, 0},
                        {3, 1, 1, 3}, {4, 1, 1, 2}, {4, 2, 2, 3}, {4, 1, 4, 0},
                        {4, 1, 2, 1}, {8, 1, 1, 3}, {8, 2, 2, 3}, {8, 1, 4, 2},
                        {8, 4, 2, 1}, {8, 1, 8, 3}, {8, 2, 1, 0}, {4, 2, 1, 3, DType::bfloat16}};

// The first ranks of the job in one layout.
class Trainer {
 public:
  Trainer(std::unique_ptr<Communicator> world, const Way& way, const ModelConfig& config)
      : device_(make_cpu_device(1, false)),
        layout_(make_layout(way.world, world->rank(), way.sp, way.tp)),
        mesh_(std::move(world), layout_),
        weights_(*device_, mesh_, config, {way.stage, {}, way.dtype}),
        step_(weights_, settings(way)) {}

  // Every element of the weights and of both moments has a value of its own.
  static float value(int kind, std::size_t p, std::int64_t i) {
    return static_cast<float>(kind + 1) + static_cast<float>(p) * 1e-2f + static_cast<float>(i) * 1e-6f;
  }
  static FetchRange values(int kind) {
    return [kind](std::size_t p, std::int64_t first, std::int64_t count, float* out) {
      for (std::int64_t i = 0; i < count; ++i) out[i] = value(kind, p, first + i);
    };
  }
  void fill() {
    weights_.load(values(0));
    step_.load_moments(0, values(1));
    step_.load_moments(1, values(2));
  }
  void load(const Checkpoint& from) {
    weights_.load(from.values(""));
    step_.load_moments(0, from.values("exp_avg."));
    step_.load_moments(1, from.values("exp_avg_sq."));
  }
  std::string save(const std::string& run_dir, const TrainerState& state) {
    fs::create_directories(run_dir);
    return save_checkpoint(run_dir,
                           {state,
                            weights_.config(),
                            weights_.whole(weights_.source()),
                            {weights_.whole(step_.moment_source(0)), weights_.whole(step_.moment_source(1))},
                            "tokenizer"},
                           mesh_.world);
  }
  Communicator& world() { return mesh_.world; }
  ModelWeights& weights() { return weights_; }

 private:
  static StepSettings settings(const Way& way) {
    StepSettings s;
    s.seq_len = 8;
    s.zero = {way.stage, {}, way.dtype};
    return s;
  }
  std::unique_ptr<Device> device_;
  Layout layout_;
  Mesh mesh_;
  ModelWeights weights_;
  Step step_;
};

// Runs on the way's ranks, if the job has as many; the others wait.
template <class F>
void on(const Way& way, const ModelConfig& config, const F& work) {
  Communicator& all = ranks().communicator();
  if (way.world <= all.size() && all.rank() < way.world) {
    std::vector<int> members(static_cast<std::size_t>(way.world));
    std::iota(members.begin(), members.end(), 0);
    Trainer trainer(way.world == 1 ? make_single_communicator("world") : all.split(members, "world"), way, config);
    work(trainer);
  }
  all.barrier();
}

void expect_values(const Checkpoint& found, const TrainerState& state) {
  EXPECT_EQ(found.state().samples, state.samples);
  EXPECT_EQ(found.state().updates(), state.updates());
  const ParameterTable table = gpt_bigcode_table(read_config(found.path()));
  for (std::size_t p = 0; p < table.parameters.size(); ++p) {
    std::vector<float> out(static_cast<std::size_t>(table.parameters[p].numel()));
    const auto n = static_cast<std::int64_t>(out.size());
    for (int kind = 0; kind < 3; ++kind) {
      found.values(kind == 0 ? "" : kind == 1 ? "exp_avg." : "exp_avg_sq.")(p, 0, n, out.data());
      for (std::int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(out[static_cast<std::size_t>(i)], Trainer::value(kind, p, i))
            << table.parameters[p].name << " kind " << kind << " element " << i;
      }
    }
  }
}

TEST(CheckpointOverRanks, WhatAnyLayoutSavesAnyOtherLoads) {
  TrainerState state;
  state.step = 7, state.skipped_steps = 1, state.samples = std::int64_t{1} << 40;
  const int size = ranks().communicator().size();
  for (const bool multi_query : {true, false}) {
    const ModelConfig config = config_of(multi_query);
    const SharedDir dir;
    for (std::size_t a = 0; a < std::size(ways); ++a) {
      const std::string saved = dir / str("saved", a);
      on(ways[a], config, [&](Trainer& trainer) {
        trainer.fill();
        const Checkpoint found(trainer.save(saved, state));
        expect_values(found, state);
      });
    }
    // All of them hold the same bytes: what matters to who loads is the layout and into how many files they were cut.
    for (std::size_t b = 0; b < std::size(ways); ++b) {
      std::size_t a = (b + 5) % std::size(ways);
      while (ways[a].world > size) a = (a + 5) % std::size(ways);
      on(ways[b], config, [&](Trainer& trainer) {
        const FoundCheckpoint found = find_checkpoint(dir / str("saved", a), trainer.world());
        ASSERT_TRUE(found.checkpoint.has_value());
        EXPECT_TRUE(found.warnings.empty());
        trainer.load(*found.checkpoint);
        expect_values(Checkpoint(trainer.save(dir / str("again", b), found.checkpoint->state())), state);
      });
    }
  }
}

TEST(CheckpointOverRanks, EveryRankWritesItsOwnFiles) {
  const ModelConfig config = config_of(true);
  const SharedDir dir;
  Communicator& all = ranks().communicator();
  on({all.size(), 1, 1, 3}, config, [&](Trainer& trainer) {
    trainer.fill();
    on_root(all, [&] { fs::create_directory(dir / "model"); });
    const auto mine = write_model(dir / "model", config, trainer.weights().table(),
                                  trainer.weights().whole(trainer.weights().source()), FileType::F32, trainer.world());
    std::size_t together = 0;
    for (const auto n : all.exchange(mine.size())) together += n;
    EXPECT_EQ(together, trainer.weights().table().parameters.size());
    // At most one file a rank, none much longer than the others'.
    const SafetensorsReader files(dir / "model", "model");
    std::map<std::string, std::int64_t> bytes;
    std::int64_t whole = 0, largest = 0;
    std::map<std::string, bool> written;  // by this rank
    for (const StoredTensor& tensor : files.tensors()) {
      const bool own = mine.contains(tensor.name);
      EXPECT_EQ(written.emplace(files.path(tensor), own).first->second, own) << "a file of two ranks";
      bytes[files.path(tensor)] += tensor.bytes();
      whole += tensor.bytes();
      largest = std::max(largest, tensor.bytes());
    }
    EXPECT_LE(bytes.size(), static_cast<std::size_t>(all.size()));
    EXPECT_GE(2 * bytes.size(), static_cast<std::size_t>(all.size()));
    for (const auto& [file, n] : bytes) EXPECT_LE(n, whole / all.size() + largest) << file;
  });
}

// The system refuses one rank every byte beyond a file's first 3000: nobody has the checkpoint, the older one stays.
TEST(CheckpointOverRanks, OneRankWithoutSpaceCostsNothingButTheCheckpoint) {
  const ModelConfig config = config_of(true);
  const SharedDir dir;
  Communicator& all = ranks().communicator();
  for (int poor = 0; poor < all.size(); ++poor) {
    on({all.size(), 1, 1, 2}, config, [&](Trainer& trainer) {
      trainer.fill();
      TrainerState state;
      state.step = 1;
      trainer.save(dir / "run", state);
      rlimit before{};
      getrlimit(RLIMIT_FSIZE, &before);
      const auto handler = std::signal(SIGXFSZ, SIG_IGN);
      const rlimit tiny{3000, before.rlim_max};
      if (all.rank() == poor) setrlimit(RLIMIT_FSIZE, &tiny);
      state.step = 2;
      const std::string said = sentence([&] { trainer.save(dir / "run", state); });
      setrlimit(RLIMIT_FSIZE, &before);
      std::signal(SIGXFSZ, handler);
      EXPECT_NE(said.find("cannot write"), std::string::npos) << said;
      const std::set<std::string> same = [&] {
        const std::vector<std::string> texts = exchange_text(all, said);
        return std::set<std::string>(texts.begin(), texts.end());
      }();
      EXPECT_EQ(same.size(), 1u) << "ranks say different things";
      EXPECT_EQ(names(dir / "run/checkpoints"), std::set<std::string>{"step-00000001"});
      const FoundCheckpoint found = find_checkpoint(dir / "run", all);
      ASSERT_TRUE(found.checkpoint.has_value());
      expect_values(*found.checkpoint, found.checkpoint->state());
      EXPECT_EQ(found.checkpoint->state().step, 1);
    });
  }
}

std::int64_t kilobytes(const char* name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return std::atoll(line.c_str() + std::string(name).size() + 1);
  }
  return 0;
}

// The most memory that `work` adds to what the process has, in bytes.
template <class F>
std::int64_t added_memory(const F& work) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak so far is what there is now
  const std::int64_t before = kilobytes("VmRSS");
  work();
  return (kilobytes("VmHWM") - before) * 1024;
}

TEST(CheckpointOverRanks, HostMemoryGrowsByLessThanAUnitAndATensor) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer keeps what is freed";
#endif
  const ModelConfig config = config_of(true, 512, 3);
  const SharedDir dir;
  Communicator& all = ranks().communicator();
  on({all.size(), 1, 1, 3}, config, [&](Trainer& trainer) {
    const std::int64_t tensor = 4 * 512 * 512 * 4, unit = 10 * 512 * 512 * 4;  // c_fc; a block's products
    trainer.fill();
    TrainerState state;
    state.step = 1;
    const std::int64_t saving = added_memory([&] { trainer.save(dir / "run", state); });
    const std::int64_t loading = added_memory([&] { trainer.load(*find_checkpoint(dir / "run", all).checkpoint); });
    EXPECT_LT(saving, unit + tensor);
    EXPECT_LT(loading, unit + tensor);
    if (all.rank() == 0) std::cout << "saving " << (saving >> 20) << " MiB, loading " << (loading >> 20) << " MiB\n";
  });
}

}  // namespace
}  // namespace onescale

// `onescale verify`: proves the scaling convention for a model in every layout that the ranks allow, or judges another
// trainer's gradients.
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "kernels/error.h"
#include "model/parameters.h"
#include "train/commands.h"
#include "train/layout_check.h"
#include "train/verify_against.h"
#include "train/verify_tables.h"

namespace onescale {

namespace {

// Bytes that one process takes for a step.
std::int64_t needed_bytes(const Options& options, const VerifyCase& c) {
  const std::unique_ptr<Device> dry = make_device(options, true);
  const std::unique_ptr<Mesh> mesh = Mesh::single();
  ModelWeights weights(*dry, *mesh, c.config);
  StepSettings settings = verify_settings(options, c);
  settings.micro_batch = c.batch.rows;
  Step(weights, settings).run_empty();
  const auto memory = dry->memory();
  // On the host, rank 0 keeps two gradients and their scaled copy beside the weights.
  return std::accumulate(memory.begin(), memory.end(), 16 * c.config.parameters());
}

// The model of a directory with its batch, or with random tokens; fewer blocks and then a smaller vocabulary where
// `ranks` processes would not all have room for the whole of it.
VerifyCase case_from(const Options& options, const ModelSource& source, int ranks, bool root) {
  VerifyCase c{source.config(), nullptr, {}};
  c.config.embd_pdrop = c.config.resid_pdrop = c.config.attn_pdrop = 0;
  if (!options.batch.empty()) {
    c.batch = read_batch(options.batch);
  } else {
    const VerifyCase small = small_case(ranks);
    c.batch = small.batch;
    check_usage(c.batch.seq_len <= c.config.n_positions, "the model's n_positions ", c.config.n_positions,
                " is below the ", c.batch.seq_len, " tokens a row that ", ranks, " ranks need; use fewer ranks");
  }
  const std::int64_t memory = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE) / ranks;
  const auto too_large = [&] { return needed_bytes(options, c) > memory; };
  while (c.config.n_layer > 1 && too_large()) c.config.n_layer /= 2;
  while (c.config.vocab_size > 1000 && too_large()) c.config.vocab_size /= 2;
  if (root && (c.config.n_layer < source.config().n_layer || c.config.vocab_size < source.config().vocab_size)) {
    std::printf(
        "one process cannot hold the whole model beside %d ranks in %s: n_layer is cut from %lld to %lld, "
        "vocab_size from %lld to %lld\n",
        ranks, bytes_text(static_cast<double>(memory * ranks)).c_str(), static_cast<long long>(source.config().n_layer),
        static_cast<long long>(c.config.n_layer), static_cast<long long>(source.config().vocab_size),
        static_cast<long long>(c.config.vocab_size));
  }
  for (auto* ids : {&c.batch.ids, &c.batch.labels})
    for (std::int32_t& id : *ids)
      if (id >= 0) id = static_cast<std::int32_t>(id % c.config.vocab_size);
  // By name: the position changes with the number of blocks; a shorter table is the beginning of the whole one.
  std::vector<std::size_t> from;
  for (const Parameter& p : gpt_bigcode_table(c.config).parameters) {
    const auto at = std::find_if(source.table().parameters.begin(), source.table().parameters.end(),
                                 [&](const Parameter& whole) { return whole.name == p.name; });
    from.push_back(static_cast<std::size_t>(at - source.table().parameters.begin()));
  }
  c.weights = [from, &source](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
    source.read(from[i], first, count, out);
  };
  return c;
}

int tables(const Options& options, Communicator& all) {
  const bool root = all.rank() == 0;
  make_layout(all.size(), all.rank(), static_cast<int>(options.sp), static_cast<int>(options.tp));
  std::optional<ModelSource> source;
  if (!options.model.empty()) source.emplace(options.model);
  check_usage(source || options.batch.empty(), "batch ", options.batch, " has no model; give --model too");
  const VerifyCase c = source ? case_from(options, *source, all.size(), root) : small_case(all.size());
  if (root) {
    std::printf("onescale verify: %s, %lld parameters, n_head %lld, vocab_size %lld, %lld rows of %lld tokens, %s\n",
                source ? source->dir().c_str() : "a small model made in memory",
                static_cast<long long>(c.config.parameters()), static_cast<long long>(c.config.n_head),
                static_cast<long long>(c.config.vocab_size), static_cast<long long>(c.batch.rows),
                static_cast<long long>(c.batch.seq_len), options.dtype.c_str());
    if (all.size() == 1) {
      std::printf(
          "This is one process. It shows the loss, its gradient, accumulation, ignored labels and clipping; what "
          "layouts of ranks do needs ranks: mpirun -n 4 onescale verify shows every row.\n");
    }
  }
  VerifyTables report(options, all);
  report.gradients(c);
  report.faults();
  int off = 0;
  if (root) {
    off = static_cast<int>(report.off().size());
    if (report.lacking() > 0) std::printf("\n%d rows need more ranks: mpirun -n 4 onescale verify\n", report.lacking());
    std::printf(off ? "\n%d figures are off:\n" : "\nall figures are right\n", off);
    for (int i = 0; i < std::min(off, 50); ++i)
      std::printf("   %s\n", report.off()[static_cast<std::size_t>(i)].c_str());
  }
  return all.exchange(off)[0] ? 1 : 0;
}

}  // namespace

int verify_command(const Options& options, World& world) {
  world.check_same("program or options", identity(options));
  return options.against.empty() ? tables(options, world.communicator())
                                 : verify_against(options, world.communicator());
}

}  // namespace onescale

// `onescale verify`: proves the scaling convention for a model in every layout that the ranks allow, or judges another
// trainer's gradients.
#include <unistd.h>

#include <optional>

#include "kernels/error.h"
#include "train/commands.h"
#include "train/verify.h"

namespace onescale {

namespace {

long long whole(std::int64_t n) {
  return n;
}

int tables(const Options& options, Communicator& all) {
  make_layout(all.size(), all.rank(), static_cast<int>(options.sp), static_cast<int>(options.tp));  // or says why not
  check_usage(!options.model.empty() || options.batch.empty(), "batch ", options.batch,
              " is of no model; give --model too");
  std::optional<ModelSource> source;
  if (!options.model.empty()) source.emplace(options.model);
  const std::int64_t memory = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE) / all.size();
  const VerifyCase c = source ? model_case(options, *source, all.size(), memory) : small_case(all.size());
  if (all.rank() == 0) {
    std::printf("onescale verify: %s, %lld parameters, n_head %lld, vocab_size %lld, %lld rows of %lld tokens, %s\n",
                source ? source->dir().c_str() : "a small model made in memory", whole(c.config.parameters()),
                whole(c.config.n_head), whole(c.config.vocab_size), whole(c.batch.rows), whole(c.batch.seq_len),
                options.dtype.c_str());
    if (source && c.config.parameters() < source->config().parameters()) {
      std::printf(
          "One process cannot hold the whole model in this machine's memory over the ranks, %s: n_layer is cut "
          "from %lld to %lld, vocab_size from %lld to %lld.\n",
          bytes_text(static_cast<double>(memory)).c_str(), whole(source->config().n_layer), whole(c.config.n_layer),
          whole(source->config().vocab_size), whole(c.config.vocab_size));
    }
    if (all.size() == 1) {
      std::printf(
          "This is one process. It shows the loss, its gradient, accumulation, ignored labels and clipping; what "
          "layouts of ranks do needs ranks: mpirun -n 4 onescale verify shows every row.\n");
    }
    std::printf("DeepSpeed 0.19.8's figures were measured on CPU ranks over gloo; # numbers are of public reports.\n");
  }
  return verify_tables(options, all, c) > 0 ? 1 : 0;
}

}  // namespace

int verify_command(const Options& options, World& world) {
  world.check_same("program or options", identity(options));
  // Ranks that part ways wait for each other; with small models no step takes that long.
  if (options.model.empty() && !options.has("comm_timeout")) world.set_timeout(60);
  return options.against.empty() ? tables(options, world.communicator())
                                 : verify_against(options, world.communicator());
}

}  // namespace onescale

// `onescale verify`: proves the scaling convention for a model in every layout that the ranks allow, or judges another
// trainer's gradients.
#include <unistd.h>

#include <optional>

#include "train/commands.h"
#include "train/verify_sheet.h"

namespace onescale {

namespace {

void gradients(Sheet& s, const VerifyCase& user) {
  s.title("Gradient over the exact gradient, from the weight change of one SGD step: sp times too large, or 1/sp?",
          "DeepSpeed 0.19.8, measured: sp=2, 4 with ALST's loss | with a local loss");
  const std::vector<Cell> all = s.everywhere("", user, [judge = s.exactly(user)](const Measured& m) {
    Figures figures = judge(m);
    const Figure norm = figures.back();
    figures.push_back({"norm over exact", norm.value / norm.right, 1, 1e-2, "  norm %.7f"});
    return figures;
  });
  check_usage(!all.empty(), "no layout of ", s.world.size(), " ranks fits the model and the options; give others");
  for (int stage = 0; stage < 4; ++stage) {
    for (const std::string reduction : reductions) {
      const std::string path = str("ZeRO-", stage, " ", reduction);
      std::string ours;
      for (int sp = 1; sp <= s.world.size(); ++sp) {
        const Cell cell = worst(all, [&](const Cell& c) { return c.path == path && c.sp == sp; });
        if (cell.bad >= 0) ours += str("sp=", sp, " ", cell.text.substr(0, cell.text.find(" / ")), "  ");
      }
      if (ours.empty()) continue;
      s.line(path, ours,
             stage < 3                   ? "2, 4 | 1, 1"
             : reduction == "all_reduce" ? "2, 4 | 1, 1       (reduce_scatter off, contiguous_gradients on)"
                                         : "1, 1 | 0.5, 0.25  (default)");
    }
  }
  s.line("By layout, the worst of these paths:", "matrices / vectors  error  norm over exact");
  std::string last;
  for (const Cell& cell : all)
    if (cell.layout != std::exchange(last, cell.layout))
      s.line(last, worst(all, [&](const Cell& c) { return c.layout == last; }).text);
}

int tables(const Options& options, Communicator& world) {
  layout_of(options, world);  // or says why not
  check_usage(!options.model.empty() || options.batch.empty(), "batch ", options.batch,
              " is of no model; give --model too");
  std::optional<ModelSource> source;
  VerifyCase c = uneven(small_case(options, world.size()));
  const std::int64_t memory = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE) / world.size();
  if (!options.model.empty()) {
    source.emplace(options.model);
    c = model_case(options, *source, options.batch.empty() ? c.batch : read_batch(options.batch, source->config()));
    check_usage(c.batch.seq_len <= c.config.n_positions, "the model's n_positions ", c.config.n_positions,
                " is below the ", c.batch.seq_len, " tokens of a row; give a shorter batch or fewer ranks");
    cut_to_memory(c, *source, memory);
  } else if (!options.has("threads")) {
    c.options.threads = 1;  // a small model's loops are too short to share
  }
  const ModelConfig &config = c.config, &whole = source ? source->config() : config;
  const std::string text =
      str("onescale verify: ", source ? source->dir() : "a small model made in memory", ", ", config.parameters(),
          " parameters, n_head ", config.n_head, ", vocab_size ", config.vocab_size, ", ", c.batch.rows, " rows of ",
          c.batch.seq_len, " tokens, ", options.dtype, "\n",
          config.parameters() == whole.parameters()
              ? ""
              : str("One process cannot hold the whole model in this machine's memory over the ranks, ",
                    bytes_text(static_cast<double>(memory)), ": n_layer is cut from ", whole.n_layer, " to ",
                    config.n_layer, ", vocab_size from ", whole.vocab_size, " to ", config.vocab_size, ".\n"),
          world.size() > 1 ? ""
                           : "This is one process. It shows the loss, its gradient, accumulation, ignored labels and "
                             "clipping; what layouts of ranks do needs ranks: mpirun -n 4 onescale verify shows every "
                             "row.\n",
          "DeepSpeed 0.19.8's figures were measured on CPU ranks over gloo; # numbers are of public reports.\n");
  if (world.rank() == 0) std::fputs(text.c_str(), stdout);
  Sheet sheet(world);
  gradients(sheet, c);
  fault_tables(sheet, options);
  return sheet.finish() > 0 ? 1 : 0;
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

// `onescale prepare`: documents to a tokenizer and token shards.
#include <unistd.h>

#include <cstdio>
#include <iomanip>

#include "data/prepare.h"
#include "data/tokenizer.h"
#include "kernels/error.h"
#include "train/commands.h"
#include "train/metrics.h"
#include "train/signals.h"

namespace onescale {

int prepare_command(const Options& options) {
  PrepareOptions prepare_options;
  prepare_options.inputs = options.input;
  prepare_options.patterns = options.pattern;
  prepare_options.out = options.out;
  prepare_options.tokenizer = options.tokenizer;
  if (options.vocab_size) prepare_options.vocab_size = options.vocab_size;
  if (!options.tokenizer.empty() && options.has("vocab_size")) {
    const std::int64_t size = Tokenizer::load(options.tokenizer).vocab_size();
    check_usage(size == options.vocab_size, "vocab_size is ", options.vocab_size, ", but tokenizer ", options.tokenizer,
                " has ", size, " ids; leave one of them out");
  }
  prepare_options.tokenizer_bytes = options.tokenizer_mb * 1'000'000;
  prepare_options.validation_share = options.val_share;
  prepare_options.fim = {options.fim_rate, options.fim_spm_rate};
  prepare_options.fim_bytes = options.fim_bytes;
  prepare_options.seed = static_cast<std::uint64_t>(options.seed);
  prepare_options.threads = static_cast<int>(options.threads);
  prepare_options.shard_tokens = options.shard_tokens;
  Log log("", isatty(STDOUT_FILENO) != 0);
  double last_line = 0;
  const char* last_phase = nullptr;
  catch_stop_signals();
  prepare_options.progress = [&](const PrepareProgress& p) {
    check(stop_signal() == 0, "stopped by a signal; nothing is kept of ", options.out);
    // Off a terminal a line every ten seconds is enough.
    const bool due = p.phase != last_phase || p.seconds >= last_line + 10;
    if (due) last_line = p.seconds;
    last_phase = p.phase;
    const std::string text = str(p.phase, ": ", std::fixed, std::setprecision(1), static_cast<double>(p.bytes) / 1e6,
                                 " of ", static_cast<double>(p.total_bytes) / 1e6, " MB, ", p.bytes_per_second() / 1e6,
                                 " MB/s, ", p.tokens, " tokens, ", duration_text(p.seconds_left()), " left");
    if (p.bytes < p.total_bytes)
      log.progress(text, due);
    else
      log.line(text);
  };
  const PrepareSummary summary = prepare(prepare_options);
  const auto line = [](const char* name, const SplitSummary& s) {
    std::printf(
        "%-6s %lld documents, %.2f MB, %lld tokens (%.2f bytes a token) in %lld shards; fill-in-the-middle: %lld PSM, "
        "%lld SPM\n",
        name, static_cast<long long>(s.documents), static_cast<double>(s.bytes) / 1e6, static_cast<long long>(s.tokens),
        s.tokens ? static_cast<double>(s.bytes) / static_cast<double>(s.tokens) : 0.0, static_cast<long long>(s.shards),
        static_cast<long long>(s.psm), static_cast<long long>(s.spm));
  };
  if (summary.reused)
    std::printf("%s was made from the same input with the same settings already\n", options.out.c_str());
  line("train", summary.train);
  line("val", summary.val);
  if (summary.tokenizer_documents > 0) {
    std::printf("tokenizer trained on %.2f MB, %lld of the training documents, chosen by the seed (tokenizer_mb)\n",
                static_cast<double>(summary.tokenizer_bytes) / 1e6,
                static_cast<long long>(summary.tokenizer_documents));
  }
  if (summary.val.documents == 0) {
    std::printf("nothing is held out (val_share %g of %lld documents): train goes on without evaluation\n",
                options.val_share, static_cast<long long>(summary.train.documents));
  }
  std::printf("%s: vocabulary of %lld, %.1f s\n", options.out.c_str(), static_cast<long long>(summary.vocab_size),
              summary.seconds);
  return 0;
}

}  // namespace onescale

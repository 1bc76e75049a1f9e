// `onescale eval`: loss, perplexity and bits per byte of a model on prepared data.
#include <cmath>

#include "kernels/error.h"
#include "train/commands.h"
#include "train/evaluate.h"
#include "train/session.h"

namespace onescale {

int eval_command(const Options& options) {
  const ModelSource source(options.model);
  const std::optional<Tokenizer> tokenizer = source.tokenizer();
  Vocabulary vocabulary;
  vocabulary.size = source.config().vocab_size;
  if (tokenizer) vocabulary.hash = tokenizer->hash();
  const Dataset dataset(options.data, options.split, vocabulary, static_cast<int>(options.threads));
  const std::int64_t T = options.seq_len ? options.seq_len : source.config().n_positions;
  Batches batches(dataset, T, 0, SampleOrder::sequential);

  const DType dtype = parse_dtype(options.dtype);
  const std::int64_t B = options.micro_batch;
  const std::unique_ptr<Device> device = planned_device(options, [&](Device& dry) {
    ModelWeights weights(dry, source.config(), dtype);
    GptBigCode model(dry, source.config(), B, T, dtype, Recompute::none, false);
    Evaluator(weights, model, B, T).run_empty();
  });
  ModelWeights weights(*device, source.config(), dtype);
  weights.load([&](std::size_t i, float* out) { source.read(i, out); });
  GptBigCode model(*device, source.config(), B, T, dtype, Recompute::none, false);
  const EvalResult result =
      Evaluator(weights, model, B, T).run(batches, tokenizer ? &*tokenizer : nullptr, options.eval_rows, [] {
        return false;
      });
  check(std::isfinite(result.loss_sum), source.dir(), ": the loss is ", result.loss(), "; its weights are damaged");
  std::printf("%s on %s: %s\n", source.dir().c_str(), dataset.describe().c_str(), result.text().c_str());
  return 0;
}

}  // namespace onescale

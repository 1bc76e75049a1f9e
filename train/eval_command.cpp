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
  const Dataset dataset(options.data, options.split, vocabulary);
  const std::int64_t T = options.seq_len ? options.seq_len : source.config().n_positions;
  Batches batches(dataset, T, 0, SampleOrder::sequential);

  ZeroSettings whole;
  whole.dtype = parse_dtype(options.dtype);
  const std::int64_t B = options.micro_batch;
  const auto make = [&](Device& device, Mesh& mesh) {
    return GptBigCode(device, mesh, source.config(), SpMode::ulysses, B, T, whole.dtype, Recompute::none, false);
  };
  const std::unique_ptr<Mesh> mesh = Mesh::single();
  const std::unique_ptr<Device> device = planned_device(options, mesh->layout, [&](Device& dry, Mesh& groups) {
    ModelWeights weights(dry, groups, source.config(), whole);
    GptBigCode model = make(dry, groups);
    Evaluator(weights, model, B, T).run_empty();
  });
  ModelWeights weights(*device, *mesh, source.config(), whole);
  weights.load(source.fetch());
  GptBigCode model = make(*device, *mesh);
  const EvalResult result =
      Evaluator(weights, model, B, T).run(batches, tokenizer ? &*tokenizer : nullptr, options.eval_rows, [] {
        return false;
      });
  check(std::isfinite(result.loss_sum), source.dir(), ": the loss is ", result.loss(), "; its weights are damaged");
  std::printf("%s on %s: %s\n", source.dir().c_str(), dataset.describe().c_str(), result.text().c_str());
  return 0;
}

}  // namespace onescale

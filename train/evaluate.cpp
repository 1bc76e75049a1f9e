// The loss on held-out text, and `onescale eval`: loss, perplexity and bits per byte of a model on prepared data.
#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

#include "kernels/error.h"
#include "train/commands.h"
#include "train/session.h"

namespace onescale {

double EvalResult::loss() const {
  return loss_sum / static_cast<double>(good_tokens);
}

double EvalResult::perplexity() const {
  return std::exp(loss());
}

double EvalResult::bits_per_byte() const {
  return bytes > 0 ? loss_sum / std::log(2.0) / static_cast<double>(bytes) : std::numeric_limits<double>::quiet_NaN();
}

std::string EvalResult::text() const {
  std::ostringstream out;
  out << std::fixed << std::setprecision(4) << "loss " << loss() << " (perplexity " << std::setprecision(2)
      << perplexity();
  if (bytes > 0) out << ", " << std::setprecision(4) << bits_per_byte() << " bits per byte";
  out << ") on " << good_tokens << " tokens";
  return out.str();
}

Evaluator::Evaluator(ModelWeights& weights, GptBigCode& model, std::int64_t micro_batch, std::int64_t seq_len)
    : weights_(weights),
      model_(model),
      micro_batch_(micro_batch),
      seq_len_(seq_len),
      sum_(weights.device().allocate(Kind::workspace, DType::float64, {1})) {}

void Evaluator::add(const Batch& batch) {
  // A short micro-batch is filled with rows whose labels are all ignored.
  std::vector<std::int32_t> ids = batch.ids, labels = batch.labels;
  ids.resize(static_cast<std::size_t>(micro_batch_ * seq_len_), 0);
  labels.resize(ids.size(), ignored_label);
  model_.forward(sum_, {ids.data(), labels.data()}, weights_.units());
}

EvalResult Evaluator::run(Batches& batches, const Tokenizer* tokenizer, std::int64_t samples,
                          const std::function<bool()>& stop) {
  Mesh& mesh = weights_.mesh();
  const std::int64_t all = samples > 0 ? std::min(samples, batches.windows()) : batches.windows();
  EvalResult mine, result;
  weights_.device().fill(sum_, 0);
  const auto rows_at = [&](std::int64_t first) { return std::clamp(all - first, std::int64_t{0}, micro_batch_); };
  const std::int64_t stride = micro_batch_ * mesh.layout.dp, begin = micro_batch_ * mesh.layout.dp_rank();
  for (std::int64_t first = begin; first - begin < all && !stop(); first += stride) {
    const Batch batch = rows_at(first) > 0 ? batches.rows(first, rows_at(first)) : Batch{};
    if (rows_at(first + stride) > 0) batches.prefetch(first + stride, rows_at(first + stride));
    add(batch);
    mine.good_tokens += batch.good_tokens;
    for (const std::int32_t label : batch.labels) {
      if (tokenizer && label != ignored_label) mine.bytes += tokenizer->byte_length(label);
    }
  }
  weights_.device().download(&mine.loss_sum, sum_);
  for (const EvalResult& part : mesh.shard->exchange(mine)) result.loss_sum += part.loss_sum;
  for (const EvalResult& part : mesh.dp->exchange(mine)) {
    result.good_tokens += part.good_tokens;
    result.bytes += part.bytes;
  }
  return result;
}

void Evaluator::run_empty() {
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(micro_batch_ * seq_len_), 0);
  model_.forward(sum_, {zeros.data(), zeros.data()}, weights_.units());
  model_.run_head_empty();
}

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
  check(result.good_tokens > 0, dataset.describe(), ", but the rows evaluated hold no target, every label is ignored; ",
        "raise eval_rows, or prepare text that is to be predicted");
  check(std::isfinite(result.loss_sum), source.dir(), ": the loss is ", result.loss(), "; its weights are damaged");
  std::printf("%s on %s: %s\n", source.dir().c_str(), dataset.describe().c_str(), result.text().c_str());
  return 0;
}

}  // namespace onescale

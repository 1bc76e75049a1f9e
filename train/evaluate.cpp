#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

namespace onescale {

double EvalResult::loss() const {
  return good_tokens > 0 ? loss_sum / static_cast<double>(good_tokens) : 0;
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
      sum_(weights.device().allocate(Kind::workspace, DType::float64, {1})),
      token_loss_(weights.device().allocate(Kind::workspace, DType::float32, {micro_batch * seq_len})) {}

double Evaluator::loss_sum(const HostRows& all, float* token_losses) {
  Device& device = weights_.device();
  const std::int64_t B = micro_batch_, T = seq_len_;
  device.fill(sum_, 0);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(B * T)), labels(ids.size());
  std::vector<float> losses(token_losses ? ids.size() : 0);
  for (std::int64_t row = 0; row < all.rows; row += B) {
    const std::int64_t n = std::min(B, all.rows - row) * T;
    // A short last micro-batch is filled with rows whose labels are all ignored.
    std::fill(std::copy_n(all.ids + row * T, n, ids.begin()), ids.end(), 0);
    std::fill(std::copy_n(all.labels + row * T, n, labels.begin()), labels.end(), ignored_label);
    model_.forward(sum_, token_losses ? token_loss_ : Tensor(), {ids.data(), labels.data()}, weights_.units());
    if (token_losses) {
      device.download(losses.data(), token_loss_);
      std::copy_n(losses.begin(), n, token_losses + row * T);
    }
  }
  double sum = 0;
  device.download(&sum, sum_);
  return sum;
}

EvalResult Evaluator::run(Batches& batches, const Tokenizer* tokenizer, std::int64_t samples,
                          const std::function<bool()>& stop) {
  const std::int64_t all = samples > 0 ? std::min(samples, batches.windows()) : batches.windows();
  EvalResult result;
  for (std::int64_t first = 0; first < all && !stop(); first += micro_batch_) {
    const Batch batch = batches.rows(first, std::min(micro_batch_, all - first));
    const std::int64_t next = first + batch.rows;
    if (next < all) batches.prefetch(next, std::min(micro_batch_, all - next));
    result.loss_sum += loss_sum({batch.ids.data(), batch.labels.data(), batch.rows});
    result.good_tokens += batch.good_tokens;
    for (const std::int32_t label : batch.labels) {
      if (tokenizer && label != ignored_label) result.bytes += tokenizer->byte_length(label);
    }
  }
  return result;
}

void Evaluator::run_empty() {
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(micro_batch_ * seq_len_), 0);
  loss_sum({zeros.data(), zeros.data(), micro_batch_});
}

}  // namespace onescale

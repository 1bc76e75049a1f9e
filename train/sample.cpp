#include "train/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/error.h"
#include "kernels/philox.h"

namespace onescale {

std::int32_t sample_token(std::span<const float> logits, const SampleSettings& settings, std::int64_t index) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  check(std::isfinite(*likeliest), "the model's logits are not finite; its weights are damaged");
  if (settings.temperature <= 0) return static_cast<std::int32_t>(likeliest - logits.begin());

  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::size_t kept = ids.size();
  if (settings.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(settings.top_k));
  const auto logit = [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; };
  std::partial_sort(
      ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(kept), ids.end(),
      [&](std::int32_t a, std::int32_t b) { return logit(a) > logit(b) || (logit(a) == logit(b) && a < b); });
  std::vector<double> weight(kept);
  for (std::size_t i = 0; i < kept; ++i)
    weight[i] = std::exp((static_cast<double>(logit(ids[i])) - *likeliest) / settings.temperature);
  double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  if (settings.top_p < 1) {
    double reached = 0;
    std::size_t n = 0;
    while (n < kept && reached < settings.top_p * total) reached += weight[n++];
    kept = std::max<std::size_t>(n, 1);
    total = reached > 0 ? reached : weight[0];
  }
  const Philox word = philox({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), 0,
                              static_cast<std::uint32_t>(Site::sample)},
                             settings.seed);
  double left = (word[0] + 0.5) / 4294967296.0 * total;
  for (std::size_t i = 0; i < kept; ++i) {
    left -= weight[i];
    if (left < 0) return ids[i];
  }
  return ids[kept - 1];
}

std::vector<std::int32_t> generate(Decoder& decoder, Weights& weights, std::span<const std::int32_t> prompt,
                                   std::int32_t end_of_text, const SampleSettings& settings,
                                   const std::function<bool(std::int32_t)>& on_token) {
  decoder.reset();
  std::vector<std::int32_t> added;
  std::span<const std::int32_t> next = prompt;
  while (static_cast<std::int64_t>(added.size()) < settings.max_new_tokens) {
    const std::vector<float>& logits = decoder.append(next, weights);
    const std::int32_t id = sample_token(logits, settings, decoder.length());
    if (id == end_of_text) break;
    added.push_back(id);
    if (!on_token(id) || decoder.length() >= decoder.capacity()) break;
    next = std::span<const std::int32_t>(&added.back(), 1);
  }
  return added;
}

}  // namespace onescale

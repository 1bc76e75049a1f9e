// Choosing the next token, and `onescale generate`: continues a prompt, or fills in between a prefix and a suffix.
// Standard output is the new text alone, as it comes.
#include "train/sample.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "data/fim.h"
#include "kernels/error.h"
#include "kernels/philox.h"
#include "parallel/file.h"
#include "train/commands.h"
#include "train/metrics.h"
#include "train/session.h"

namespace onescale {

namespace {

// A token drawn from softmax(logits / temperature), cut by top_k and then by top_p, to the likeliest whose
// probabilities reach it together (Holtzman et al. 2020). `index` is the token's number in the sequence: the draw is a
// function of (seed, index). Ties go to the smaller id.
std::int32_t sample_token(std::span<const float> logits, const Options& options, std::int64_t index) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (options.temperature <= 0) return static_cast<std::int32_t>(likeliest - logits.begin());

  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::size_t kept = ids.size();
  if (options.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(options.top_k));
  const auto logit = [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; };
  std::partial_sort(
      ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(kept), ids.end(),
      [&](std::int32_t a, std::int32_t b) { return logit(a) > logit(b) || (logit(a) == logit(b) && a < b); });
  std::vector<double> weight(kept);
  for (std::size_t i = 0; i < kept; ++i)
    weight[i] = std::exp((static_cast<double>(logit(ids[i])) - *likeliest) / options.temperature);
  double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  if (options.top_p < 1) {
    double reached = 0;
    std::size_t n = 0;
    while (n < kept && reached < options.top_p * total) reached += weight[n++];
    kept = std::max<std::size_t>(n, 1);
    total = reached > 0 ? reached : weight[0];
  }
  const Philox word = philox({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), 0,
                              static_cast<std::uint32_t>(Site::sample)},
                             static_cast<std::uint64_t>(options.seed));
  double left = (word[0] + 0.5) / 4294967296.0 * total;
  for (std::size_t i = 0; i < kept; ++i) {
    left -= weight[i];
    if (left < 0) return ids[i];
  }
  return ids[kept - 1];
}

}  // namespace

std::optional<std::vector<std::int32_t>> generate(Decoder& decoder, Weights& weights,
                                                  std::span<const std::int32_t> prompt, std::int32_t end_of_text,
                                                  const Options& options, std::int64_t max_new_tokens,
                                                  const std::function<void(std::int32_t)>& on_token) {
  decoder.reset();
  std::vector<std::int32_t> added;
  std::span<const std::int32_t> next = prompt;
  while (static_cast<std::int64_t>(added.size()) < max_new_tokens) {
    const std::vector<float>& logits = decoder.append(next, weights);
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) return std::nullopt;
    const std::int32_t id = sample_token(logits, options, decoder.length());
    if (id == end_of_text) break;
    added.push_back(id);
    on_token(id);
    if (decoder.length() >= decoder.capacity()) break;
    next = std::span<const std::int32_t>(&added.back(), 1);
  }
  return added;
}

int generate_command(const Options& options) {
  const ModelSource source(options.model);
  const ModelConfig& config = source.config();
  const std::optional<Tokenizer> tokenizer = source.tokenizer();
  check(tokenizer.has_value(), source.dir(),
        " has no tokenizer.model; copy the one that the model was trained with there");
  check(tokenizer->vocab_size() <= config.vocab_size, "the tokenizer has ", tokenizer->vocab_size(),
        " ids, the model only ", config.vocab_size, "; they do not belong together");

  const std::string text = options.prompt_file.empty() ? options.prompt : read_text(options.prompt_file);
  std::vector<std::int32_t> prompt =
      options.infill ? infill_prompt(*tokenizer, text, options.suffix) : tokenizer->encode(text);
  prompt.insert(prompt.begin(), tokenizer->eot());  // as training documents begin
  const std::int64_t length = std::ssize(prompt);
  check_usage(length < config.n_positions, "the prompt is ", length, " tokens long, the model's n_positions is ",
              config.n_positions, "; shorten it");
  const std::int64_t capacity = std::min(length + options.max_new_tokens, config.n_positions);

  ZeroSettings whole;
  whole.dtype = parse_dtype(options.dtype);
  const auto make = [&](Device& device, Mesh& mesh) {
    const std::int64_t together = std::min<std::int64_t>(capacity, 128);
    return GptBigCode(device, mesh, config, SpMode::ulysses, 1, together, whole.dtype, Recompute::none, false);
  };
  const std::unique_ptr<Mesh> mesh = Mesh::single();
  const std::unique_ptr<Device> device = planned_device(options, mesh->layout, [&](Device& dry, Mesh& groups) {
    ModelWeights weights(dry, groups, config, whole);
    GptBigCode model = make(dry, groups);
    Decoder decoder(model, capacity);
    decoder.append(prompt, weights.units());
    decoder.append(std::span(prompt).first(1), weights.units());
  });
  ModelWeights weights(*device, *mesh, config, whole);
  weights.load(source.fetch());
  GptBigCode model = make(*device, *mesh);
  Decoder decoder(model, capacity);
  const auto written = [&](std::int32_t id) {
    const std::string_view bytes = tokenizer->piece_bytes(id);
    if (!bytes.empty()) std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    check_output();
  };
  check(generate(decoder, weights.units(), prompt, tokenizer->eot(), options, options.max_new_tokens, written)
            .has_value(),
        source.dir(), ": its logits are not finite; its weights are damaged");
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace onescale

// Choosing the next token, and writing text with a model.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "data/tokenizer.h"
#include "model/decoder.h"

namespace onescale {

struct SampleSettings {
  double temperature = 1;  // 0: always the likeliest token
  std::int64_t top_k = 0;  // only the k likeliest; 0: all
  double top_p = 1;        // only the likeliest whose probabilities reach p together (Holtzman et al. 2020)
  std::int64_t max_new_tokens = 128;
  std::uint64_t seed = 0;
};

// A token drawn from softmax(logits / temperature), cut by top_k and then top_p. `index` is the token's number in the
// sequence: the draw is a function of (seed, index). Ties go to the smaller id.
std::int32_t sample_token(std::span<const float> logits, const SampleSettings& settings, std::int64_t index);

// Continues `prompt` until the end of text, max_new_tokens or the decoder's capacity, and returns the new ids, without
// the end of text. `on_token` is called with each as it is chosen and stops the loop by returning false.
std::vector<std::int32_t> generate(Decoder& decoder, Weights& weights, std::span<const std::int32_t> prompt,
                                   std::int32_t end_of_text, const SampleSettings& settings,
                                   const std::function<bool(std::int32_t)>& on_token);

}  // namespace onescale

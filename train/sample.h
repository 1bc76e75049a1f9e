// Writing text with a model.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "model/decoder.h"
#include "train/options.h"

namespace onescale {

// Continues `prompt` until the end of text, max_new_tokens or the decoder's capacity, and returns the new ids, without
// the end of text; nothing where the model's logits are not finite. Tokens are drawn as the options' temperature,
// top_k, top_p and seed say. `on_token` is called with each as it is chosen.
std::optional<std::vector<std::int32_t>> generate(
    Decoder& decoder, Weights& weights, std::span<const std::int32_t> prompt, std::int32_t end_of_text,
    const Options& options, std::int64_t max_new_tokens,
    const std::function<void(std::int32_t)>& on_token = [](std::int32_t) {});

}  // namespace onescale

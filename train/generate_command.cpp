// `onescale generate`: continues a prompt, or fills in between a prefix and a suffix. Standard output is the new text
// alone, as it comes.
#include <cstdio>

#include "data/fim.h"
#include "kernels/error.h"
#include "parallel/file.h"
#include "train/commands.h"
#include "train/sample.h"
#include "train/session.h"

namespace onescale {

int generate_command(const Options& options) {
  const ModelSource source(options.model);
  const ModelConfig& config = source.config();
  const std::optional<Tokenizer> tokenizer = source.tokenizer();
  check(tokenizer.has_value(), source.dir(),
        " has no tokenizer.model; copy the one that the model was trained with there");
  check(tokenizer->vocab_size() <= config.vocab_size, "the tokenizer has ", tokenizer->vocab_size(),
        " ids, the model only ", config.vocab_size, "; they do not belong together");

  // Training documents begin with the end of text, so a prompt does too.
  std::vector<std::int32_t> prompt = {tokenizer->eot()};
  const std::string text = options.prompt_file.empty() ? options.prompt : read_text(options.prompt_file);
  const std::vector<std::int32_t> ids =
      options.infill ? infill_prompt(*tokenizer, text, options.suffix) : tokenizer->encode(text);
  prompt.insert(prompt.end(), ids.begin(), ids.end());
  const auto length = static_cast<std::int64_t>(prompt.size());
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
  const SampleSettings settings = {options.temperature, options.top_k, options.top_p, options.max_new_tokens,
                                   static_cast<std::uint64_t>(options.seed)};
  generate(decoder, weights.units(), prompt, tokenizer->eot(), settings, [&](std::int32_t id) {
    const std::string_view bytes = tokenizer->piece_bytes(id);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
    return true;
  });
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace onescale

// Fill-in-the-middle (Bavarian et al. 2022) of documents, or of pieces of them, before they are packed. Cuts lie on
// bytes and, in UTF-8 text, never inside a character; the three parts are encoded separately and together are the
// piece.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "kernels/philox.h"

namespace onescale {

// Draws for a piece of document number `document` are philox({document low word, high word, what + 4 * piece,
// Site::fim}, seed).
enum class DocumentDraw : std::uint32_t { mode = 0, cuts = 1, split = 2 };
Philox document_draw(std::uint64_t seed, std::int64_t document, DocumentDraw what, std::int64_t piece = 0);
// Whether a word of a draw falls to an event of this probability.
inline bool happens(double rate, std::uint32_t word) {
  return static_cast<double>(word) < rate * 4294967296.0;
}

struct FimRates {
  double fim = 0.5;  // pieces that are transformed
  double spm = 0.5;  // of these: suffix first
};

enum class FimMode : std::uint8_t { none, psm, spm };

// piece = prefix + middle + suffix, each possibly empty; with mode none the piece is `prefix`.
struct FimParts {
  FimMode mode = FimMode::none;
  std::string_view prefix, middle, suffix;
};

// Where the first piece of `text` ends: with the first line that ends after `bytes` or more of them, or with the text;
// 0 bytes: with the text.
std::size_t fim_piece(std::string_view text, std::int64_t bytes);

// Whether and where a piece is cut: a function of (seed, document number, the piece's number in it, its bytes).
FimParts fim_split(std::string_view text, const FimRates& rates, std::uint64_t seed, std::int64_t document,
                   std::int64_t piece = 0);

// One stretch of a transformed piece: a special id, or text to encode when id is -1.
struct FimSegment {
  std::int32_t id = -1;
  std::string_view text;
};

// none: prefix. psm: <fim_prefix> prefix <fim_suffix> suffix <fim_middle> middle. spm (the paper's variant 2):
// <fim_prefix> <fim_suffix> suffix <fim_middle> prefix middle. Throws UsageError when the tokenizer lacks the symbols.
std::vector<FimSegment> fim_segments(const FimParts& parts, const Tokenizer& tokenizer);

// The prompt after which a model writes the middle: <fim_prefix> prefix <fim_suffix> suffix <fim_middle>.
std::vector<std::int32_t> infill_prompt(const Tokenizer& tokenizer, std::string_view prefix, std::string_view suffix);

}  // namespace onescale

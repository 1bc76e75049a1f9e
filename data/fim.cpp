#include "data/fim.h"

#include <algorithm>

#include "kernels/error.h"

namespace onescale {
namespace {

// Uniform in [0, n) up to a bias of n / 2^64: the high half of a 64-bit word times n.
std::uint64_t below(std::uint64_t n, std::uint32_t low, std::uint32_t high) {
  const std::uint64_t word = std::uint64_t{high} << 32 | low;
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(word) * n >> 64);
}

// The nearest position at or before `cut` that is not inside a UTF-8 character: at most three continuation bytes are
// stepped over.
std::size_t snap(std::string_view text, std::size_t cut) {
  for (std::size_t i = cut; i < text.size() && cut - i <= 3; --i) {  // below 0 is beyond the end
    if ((static_cast<std::uint8_t>(text[i]) & 0xC0) != 0x80) return i;
  }
  return cut;
}

}  // namespace

Philox document_draw(std::uint64_t seed, std::int64_t document, DocumentDraw what, std::int64_t piece) {
  const auto number = static_cast<std::uint64_t>(document);
  return philox(
      {static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32),
       static_cast<std::uint32_t>(what) + 4 * static_cast<std::uint32_t>(piece), static_cast<std::uint32_t>(Site::fim)},
      seed);
}

std::size_t fim_piece(std::string_view text, std::int64_t bytes) {
  if (bytes <= 0 || static_cast<std::size_t>(bytes) >= text.size()) return text.size();
  const std::size_t line_end = text.find('\n', static_cast<std::size_t>(bytes) - 1);
  return line_end == text.npos ? text.size() : line_end + 1;
}

FimParts fim_split(std::string_view text, const FimRates& rates, std::uint64_t seed, std::int64_t document,
                   std::int64_t piece) {
  const Philox mode = document_draw(seed, document, DocumentDraw::mode, piece);
  if (!happens(rates.fim, mode[0])) return {FimMode::none, text, {}, {}};
  const Philox draw = document_draw(seed, document, DocumentDraw::cuts, piece);
  std::size_t a = snap(text, below(text.size() + 1, draw[0], draw[1]));
  std::size_t b = snap(text, below(text.size() + 1, draw[2], draw[3]));
  if (a > b) std::swap(a, b);
  return {happens(rates.spm, mode[1]) ? FimMode::spm : FimMode::psm, text.substr(0, a), text.substr(a, b - a),
          text.substr(b)};
}

std::vector<FimSegment> fim_segments(const FimParts& parts, const Tokenizer& tokenizer) {
  if (parts.mode == FimMode::none) return {{-1, parts.prefix}};
  check_usage(tokenizer.has_fim(),
              "The tokenizer has no <fim_prefix>, <fim_middle> and <fim_suffix>: set fim_rate to 0 or train a "
              "tokenizer that has them.");
  const FimSegment prefix{tokenizer.fim_prefix(), {}}, middle{tokenizer.fim_middle(), {}},
      suffix{tokenizer.fim_suffix(), {}};
  if (parts.mode == FimMode::psm)
    return {prefix, {-1, parts.prefix}, suffix, {-1, parts.suffix}, middle, {-1, parts.middle}};
  return {prefix, suffix, {-1, parts.suffix}, middle, {-1, parts.prefix}, {-1, parts.middle}};
}

std::vector<std::int32_t> infill_prompt(const Tokenizer& tokenizer, std::string_view prefix, std::string_view suffix) {
  std::vector<std::int32_t> ids;
  for (const FimSegment& segment : fim_segments({FimMode::psm, prefix, {}, suffix}, tokenizer)) {
    if (segment.id >= 0) {
      ids.push_back(segment.id);
    } else {
      const std::vector<std::int32_t> part = tokenizer.encode(segment.text);
      ids.insert(ids.end(), part.begin(), part.end());
    }
  }
  return ids;
}

}  // namespace onescale

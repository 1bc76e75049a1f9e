#include "train/layout_check.h"

#include <cstdint>
#include <numeric>

#include "kernels/error.h"

namespace onescale {
namespace {

std::string divisors(std::int64_t n) {  // "1, 2 or 4"
  std::string out = "1";
  for (std::int64_t d = 2; d <= n; ++d) {
    if (n % d == 0) out += str(d == n ? " or " : ", ", d);
  }
  return out;
}

// "the nearest that fit are 96 and 128": the multiples of `unit` around n, which is none.
std::string nearest_multiples(std::int64_t n, std::int64_t unit) {
  const std::int64_t below = n / unit * unit;
  return below == 0 ? str("the nearest that fits is ", unit)
                    : str("the nearest that fit are ", below, " and ", below + unit);
}

}  // namespace

void check_layout(const ModelConfig& config, std::int64_t seq_len, const Layout& layout, const std::string& sp_mode) {
  const std::int64_t sp = layout.sp, tp = layout.tp;
  const auto check_tp = [&](const char* name, std::int64_t size) {
    check_usage(size % tp == 0, name, " is ", size, ", which tp ", tp, " does not divide; tp may be ",
                divisors(std::gcd(config.n_head, config.n_inner)));
  };
  check_tp("n_head", config.n_head);
  check_tp("n_inner", config.n_inner);
  const bool ulysses = sp_mode == "ulysses";
  check_usage(!ulysses || config.n_head % (sp * tp) == 0, "n_head is ", config.n_head, ", which sp ", sp,
              tp == 1 ? "" : str(" * tp ", tp, " = ", sp * tp), " does not divide; ",
              tp == 1 ? "" : str("with tp ", tp, ", "), "sp may be ", divisors(config.n_head / tp),
              ", or sp_mode gather_kv takes any number of heads");
  const std::int64_t unit = ulysses || sp == 1 ? sp : 2 * sp;
  check_usage(seq_len % unit == 0, "seq_len is ", seq_len, ", no multiple of ",
              ulysses ? str("sp ", sp) : str("2 * sp ", sp, " = ", unit), "; ", nearest_multiples(seq_len, unit),
              ", or lower sp");
}

void check_batch(std::int64_t global_batch, std::int64_t micro_batch, const Layout& layout) {
  const std::int64_t dp = layout.dp, rows = global_batch / dp;
  check_usage(global_batch % dp == 0, "global_batch is ", global_batch, ", no multiple of dp ", dp, "; ",
              nearest_multiples(global_batch, dp));
  check_usage(rows % micro_batch == 0, "micro_batch is ", micro_batch, ", which does not divide global_batch ",
              global_batch, dp == 1 ? "" : str(" / dp ", dp, " = ", rows), "; it may be ", divisors(rows));
}

}  // namespace onescale

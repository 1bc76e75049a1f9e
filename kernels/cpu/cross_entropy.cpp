// Softmax cross-entropy over a vocabulary or a shard of one.
#include <cmath>
#include <limits>

#include "kernels/arguments.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale::cpu::inline ONESCALE_ISA {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
// Columns that stay in the first cache between the search for the maximum and the exponentials.
constexpr std::int64_t block = 1024;

void check_logits(const char* operation, const Tensor& logits, const Tensor& stats, const Tensor& labels,
                  std::int64_t rows) {
  expect_activation(operation, "logits", logits, 2);
  expect(operation,
         {{"stats", stats, DType::float32, {rows_of(logits), 3}}, {"labels", labels, DType::int32, {rows_of(logits)}}});
  check(rows >= 0 && rows <= logits.dim(-1), operation, ": rows = ", rows, " of logits ", logits.describe());
}

// The sum is rescaled whenever a block raises the maximum (Milakov and Gimelshein 2018), so the logits are read once.
template <class T>
void statistics(const T* logits, std::int64_t rows, float& most, float& total) {
  most = -infinity;
  double sum = 0;
  for (std::int64_t begin = 0; begin < rows; begin += block) {
    const T* const from = logits + begin;
    const std::int64_t n = std::min(block, rows - begin);
    f16x highest[4] = {splat(-infinity), splat(-infinity), splat(-infinity), splat(-infinity)}, terms[4] = {};
    each_vector_of_4(n, [&](std::int64_t i, auto part, int k) {
      highest[k] = max(highest[k], part.or_else(part.load(from + i), -infinity));
    });
    const float here = max(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
    if (here == -infinity) continue;  // nothing but -inf: adds nothing, and -inf - -inf is NaN
    if (here > most) {
      sum *= std::exp(double{most} - here);
      most = here;
    }
    const f16x shift = splat(most);
    each_vector_of_4(n, [&](std::int64_t i, auto part, int k) {
      __builtin_prefetch(from + block + i);  // else memory would rest while the exponentials are computed
      terms[k] += part.or_else(exp(part.load(from + i) - shift), 0);
    });
    sum += cpu::sum((terms[0] + terms[1]) + (terms[2] + terms[3]));
  }
  total = static_cast<float>(sum);
}

}  // namespace

void CpuDevice::softmax_statistics(Tensor stats, Tensor logits, Tensor labels, std::int64_t first_row,
                                   std::int64_t rows) {
  check_logits("softmax_statistics", logits, stats, labels, rows);
  Run run(*this, "softmax_statistics", 15 * logits.numel(), logits.bytes());
  if (!run) return;
  const std::int64_t n = rows_of(logits), V = logits.dim(-1);
  with_storage(logits.dtype, [&]<class T>(T) {
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t i = 0; i < n; ++i) {
      const T* const row = logits.as<T>() + i * V;
      float* const s = stats.as<float>() + i * 3;
      statistics(row, rows, s[0], s[1]);
      const std::int64_t label = labels.as<std::int32_t>()[i] - first_row;
      s[2] = label >= 0 && label < rows ? to_float(row[label]) : 0;
    }
  });
}

void CpuDevice::combine_statistics(Tensor stats, Tensor parts) {
  const std::int64_t n = stats.dim(0), shards = parts.dim(0);
  expect("combine_statistics",
         {{"stats", stats, DType::float32, {n, 3}}, {"parts", parts, DType::float32, {shards, n, 3}}});
  Run run(*this, "combine_statistics", 4 * parts.numel(), parts.bytes());
  if (!run) return;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto part = [&](std::int64_t shard) { return parts.as<float>() + (shard * n + i) * 3; };
    float most = -infinity, label = 0;
    double sum = 0;
    for (std::int64_t s = 0; s < shards; ++s) most = std::max(most, part(s)[0]);
    for (std::int64_t s = 0; s < shards; ++s) {
      // A shard that is nothing but padding has the maximum -inf and adds 0.
      if (part(s)[1] != 0) sum += part(s)[1] * std::exp(double{part(s)[0]} - most);
      label += part(s)[2];
    }
    float* const out = stats.as<float>() + i * 3;
    out[0] = most, out[1] = static_cast<float>(sum), out[2] = label;
  }
}

void CpuDevice::cross_entropy(Tensor loss, Tensor logits, Tensor stats, Tensor labels, std::int64_t first_row,
                              std::int64_t rows, float weight) {
  check_logits("cross_entropy", logits, stats, labels, rows);
  expect("cross_entropy", {{"loss", loss, DType::float32, {rows_of(logits)}}});
  const int passes = weight == 0 ? 0 : 2;
  Run run(*this, "cross_entropy", passes * 6 * logits.numel(), passes * logits.bytes());
  if (!run) return;
  const std::int64_t n = rows_of(logits), V = logits.dim(-1);
  with_storage(logits.dtype, [&]<class T>(T) {
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t i = 0; i < n; ++i) {
      T* const row = logits.as<T>() + i * V;
      const float* const s = stats.as<float>() + i * 3;
      loss.as<float>()[i] = static_cast<float>(std::log(double{s[1]}) + s[0] - s[2]);
      if (weight == 0) continue;
      const std::int64_t label = labels.as<std::int32_t>()[i] - first_row;
      const bool mine = label >= 0 && label < rows;
      const float logit = mine ? to_float(row[label]) : 0;
      const f16x shift = splat(s[0]), scale = splat(weight / s[1]);
      each_vector(rows,
                  [&](std::int64_t v, auto part) { part.store(row + v, exp(part.load(row + v) - shift) * scale); });
      // Before it is rounded: the difference from 1 of a probability near 1 would be lost in bfloat16.
      if (mine) put(row[label], (std::exp(logit - s[0]) / s[1] - 1) * weight);
      std::memset(row + rows, 0, static_cast<std::size_t>(V - rows) * sizeof(T));
    }
  });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

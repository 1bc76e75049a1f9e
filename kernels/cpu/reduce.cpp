// Sums: over columns for the gradients of biases, over everything for norms and losses.
#include "kernels/arguments.h"
#include "kernels/cpu/column_sum.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale::cpu::inline ONESCALE_ISA {

template <class T>
void column_sum(float* out, const T* x, std::int64_t n, std::int64_t C, std::int64_t stride, Write write, int threads) {
  constexpr std::int64_t chunk = 8 * lanes;  // a block's sums of that many columns stay in registers
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t first = 0; first < C; first += chunk) {
    const std::int64_t columns = std::min(chunk, C - first);
    f16x total[8] = {};
    for (std::int64_t begin = 0; begin < n; begin += sum_block) {
      const std::int64_t end = std::min(n, begin + sum_block);
      const T* from = x + begin * stride + first;
      f16x block[8] = {};
      if (columns == chunk) {
        for (std::int64_t row = begin; row < end; ++row, from += stride) {
#pragma GCC unroll 8
          for (std::int64_t i = 0; i < 8; ++i) block[i] += load(from + i * lanes);
        }
      } else {
        for (std::int64_t row = begin; row < end; ++row, from += stride) {
          each_vector(columns, [&](std::int64_t i, auto part) { block[i / lanes] += part.load(from + i); });
        }
      }
      for (int i = 0; i < 8; ++i) total[i] += block[i];
    }
    each_vector(columns, [&](std::int64_t i, auto part) {
      const f16x sum = total[i / lanes];
      part.store(out + first + i, write == Write::accumulate ? part.load(out + first + i) + sum : sum);
    });
  }
}

template void column_sum(float*, const float*, std::int64_t, std::int64_t, std::int64_t, Write, int);
template void column_sum(float*, const bf16*, std::int64_t, std::int64_t, std::int64_t, Write, int);

namespace {

constexpr std::int64_t total_block = std::int64_t{1} << 14;
constexpr std::int64_t total_ahead = 2048;  // two pages of 4 KiB: the hardware's own fetching ends with the page

// out (+)= the sum of term(x), each block of total_block elements in 64 float64 lanes, the blocks added in order.
template <class Term>
void total(double* out, const float* x, std::int64_t n, double* partial, Write write, int threads, Term term) {
  const std::int64_t blocks = (n + total_block - 1) / total_block;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t b = 0; b < blocks; ++b) {
    const float* from = x + b * total_block;
    d16x sum[4] = {};
    each_vector_of_4(std::min(total_block, n - b * total_block), [&](std::int64_t i, auto part, int k) {
      __builtin_prefetch(from + i + total_ahead);
      sum[k] += term(to_double(part.load(from + i)));
    });
    const d16x all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    double lane[lanes];
    std::memcpy(lane, &all, sizeof lane);
    for (int half = lanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    partial[b] = lane[0];
  }
  double sum = write == Write::accumulate ? *out : 0;
  for (std::int64_t b = 0; b < blocks; ++b) sum += partial[b];
  *out = sum;
}

std::int64_t partial_bytes(const Tensor& x) {
  return (x.numel() + total_block - 1) / total_block * static_cast<std::int64_t>(sizeof(double));
}

template <class Out, class In>
void add_pieces(const Tensor& out, const std::vector<Tensor>& pieces, Write write, int threads) {
  each_vector(out.numel(), threads, [&](std::int64_t i, auto part) {
    f16x sum = part.load(pieces[0].as<In>() + i);
    for (std::size_t p = 1; p < pieces.size(); ++p) sum += part.load(pieces[p].as<In>() + i);
    Out* const to = out.as<Out>() + i;
    part.store(to, write == Write::accumulate ? part.load(to) + sum : sum);
  });
}

}  // namespace

void CpuDevice::sum_pieces(Tensor out, const std::vector<Tensor>& pieces, Write write) {
  check(!pieces.empty(), "sum_pieces: there is no piece");
  const DType dtype = pieces[0].dtype;
  expect_activation("sum_pieces", "piece", pieces[0]);
  for (const Tensor& piece : pieces) expect("sum_pieces", {{"piece", piece, dtype, out.numel()}});
  expect("sum_pieces", {{"out", out, out.dtype == DType::float32 ? out.dtype : dtype, out.numel()}});
  const std::int64_t k = std::ssize(pieces);
  Run run(*this, "sum_pieces", k * out.numel(), k * pieces[0].bytes() + out.bytes());
  if (!run) return;
  with_storage(dtype, [&]<class In>(In) {
    if (out.dtype == DType::float32) {
      add_pieces<float, In>(out, pieces, write, threads_);
    } else {
      add_pieces<In, In>(out, pieces, write, threads_);
    }
  });
}

void CpuDevice::sum(Tensor out, Tensor x, Write write) {
  expect("sum", {{"out", out, DType::float64, {1}}, {"x", x, DType::float32, x.numel()}});
  Run run(*this, "sum", x.numel(), x.bytes(), partial_bytes(x));
  if (!run) return;
  total(
      out.as<double>(), x.as<float>(), x.numel(), run.scratch<double>(), write, threads_,
      [](auto x) __attribute__((always_inline)) { return x; });
}

void CpuDevice::sum_of_squares(Tensor out, Tensor x, Write write) {
  expect("sum_of_squares", {{"out", out, DType::float64, {1}}, {"x", x, DType::float32, x.numel()}});
  Run run(*this, "sum_of_squares", 2 * x.numel(), x.bytes(), partial_bytes(x));
  if (!run) return;
  total(
      out.as<double>(), x.as<float>(), x.numel(), run.scratch<double>(), write, threads_,
      [](auto x) __attribute__((always_inline)) { return x * x; });
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

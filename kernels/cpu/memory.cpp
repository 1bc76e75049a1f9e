// Memory, scratch, the record of work, transfers, fill and copy.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "kernels/arguments.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"

namespace onescale {

const char* name_of(Kind kind) {
  static constexpr const char* names[kind_count] = {"parameters", "gradients",      "optimizer", "activations",
                                                    "workspace",  "kernel scratch", "batches"};
  return names[static_cast<int>(kind)];
}

struct CpuDevice::Blocks {
  std::vector<void*> pointers;
  ~Blocks() {
    for (void* p : pointers) std::free(p);
  }
  char* take(std::int64_t bytes) {
    constexpr std::size_t alignment = 64;
    const std::size_t size =
        (static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)) + alignment - 1) / alignment * alignment;
    void* p = std::aligned_alloc(alignment, size);
    check(p != nullptr, "no memory for ", bytes,
          " bytes; a smaller micro_batch, seq_len or recompute = block needs less");
    pointers.push_back(p);
    return static_cast<char*>(p);
  }
};

namespace {

using cpu::lanes;

int available_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  return count > 0 ? count : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// A piece of work of loops that only move memory: 16K elements.
constexpr std::int64_t piece = std::int64_t{1} << 14;

// Zeroes in parallel, so that each thread's pages lie next to it.
void zero(char* p, std::int64_t bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t i = 0; i < bytes; i += piece)
    std::memset(p + i, 0, static_cast<std::size_t>(std::min(piece, bytes - i)));
}

// The elements of a tensor as rows along its last axis, after neighbouring axes that lie together in both tensors are
// merged. A row is cut into pieces.
struct Walk {
  int rank = 0;
  std::array<std::int64_t, Tensor::max_rank> shape{}, a{}, b{};
  std::int64_t pieces = 0;  // a row

  Walk(const Tensor& x, const Tensor& y) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(x.rank); ++i) {
      if (x.shape[i] == 1 && x.rank > 1) continue;
      const auto last = static_cast<std::size_t>(rank - 1);
      if (rank > 0 && a[last] == x.stride[i] * x.shape[i] && b[last] == y.stride[i] * y.shape[i]) {
        shape[last] *= x.shape[i];
        a[last] = x.stride[i];
        b[last] = y.stride[i];
      } else {
        shape[last + 1] = x.shape[i];
        a[last + 1] = x.stride[i];
        b[last + 1] = y.stride[i];
        ++rank;
      }
    }
    if (rank == 0) {  // one element
      rank = 1;
      shape[0] = a[0] = b[0] = 1;
    }
    pieces = (shape[static_cast<std::size_t>(rank - 1)] + piece - 1) / piece;
  }

  // body(offset in x, offset in y, elements) for every piece. The elements of a piece lie `a` and `b` of the last axis
  // apart.
  template <class Body>
  void run(int threads, const Body& body) const {
    const auto last = static_cast<std::size_t>(rank - 1);
    std::int64_t rows = 1;
    for (std::size_t i = 0; i < last; ++i) rows *= shape[i];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t item = 0; item < rows * pieces; ++item) {
      const std::int64_t begin = item % pieces * piece;
      std::int64_t row = item / pieces, x = begin * a[last], y = begin * b[last];
      for (std::size_t i = last; i-- > 0; row /= shape[i]) {
        x += row % shape[i] * a[i];
        y += row % shape[i] * b[i];
      }
      body(x, y, std::min(piece, shape[last] - begin));
    }
  }
  std::int64_t step_a() const {
    return a[static_cast<std::size_t>(rank - 1)];
  }
  std::int64_t step_b() const {
    return b[static_cast<std::size_t>(rank - 1)];
  }
};

template <class To, class From>
void copy_elements(To* to, const From* from, const Walk& walk, int threads) {
  const std::int64_t a = walk.step_a(), b = walk.step_b();
  walk.run(threads, [=](std::int64_t x, std::int64_t y, std::int64_t n) {
    To* p = to + x;
    const From* q = from + y;
    if constexpr (std::is_same_v<To, From>) {
      if (a == 1 && b == 1)
        std::memcpy(p, q, static_cast<std::size_t>(n) * sizeof(To));
      else
        for (std::int64_t i = 0; i < n; ++i) p[i * a] = q[i * b];
    } else {
      if (a == 1 && b == 1)
        cpu::each_vector(n, [&](std::int64_t i, auto part) { part.store(p + i, part.load(q + i)); });
      else
        for (std::int64_t i = 0; i < n; ++i) cpu::put(p[i * a], cpu::to_float(q[i * b]));
    }
  });
}

template <class T>
void fill_elements(Tensor dst, T value, int threads) {
  const Walk walk(dst, dst);
  walk.run(threads, [&](std::int64_t x, std::int64_t, std::int64_t n) {
    T* p = dst.as<T>() + x;
    if (walk.step_a() == 1)
      std::fill_n(p, n, value);
    else
      for (std::int64_t i = 0; i < n; ++i) p[i * walk.step_a()] = value;
  });
}

// y = a x + y over arrays larger than the last-level cache: two reads and a write, as in an optimizer.
double measure_bandwidth(int threads) {
  const std::int64_t cache = std::max<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  const std::int64_t n =
      std::clamp<std::int64_t>(cache, 1 << 24, 1 << 28) / piece * piece;  // floats: an array is four caches
  CpuDevice memory(threads, false);
  float* x = memory.allocate(Kind::workspace, DType::float32, {n}).as<float>();
  float* y = memory.allocate(Kind::workspace, DType::float32, {n}).as<float>();
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t begin = 0; begin < n; begin += piece) {
      for (std::int64_t i = begin; i < begin + piece; i += lanes) {
        cpu::store(y + i, cpu::load(x + i) * cpu::splat(0.5f) + cpu::load(y + i));
      }
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::max(best, 12.0 * static_cast<double>(n) / time.count());
  }
  return best;
}

// Chains of multiply-adds that stay in registers; enough of them to hide the latency, few enough for sixteen registers
// of 32 bytes.
double measure_flops(int threads) {
#ifdef __AVX512F__
  constexpr int chains = 12;
#else
  constexpr int chains = 6;
#endif
  constexpr std::int64_t rounds = 1 << 20;
  double best = 0, keep = 0;
  for (int trial = 0; trial < 8; ++trial) {
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads) reduction(+ : keep)
    {
      cpu::f16x a[chains];
      for (int c = 0; c < chains; ++c) a[c] = cpu::splat(static_cast<float>(c));
      const cpu::f16x scale = cpu::splat(0.999f), add = cpu::splat(0.001f);
      for (std::int64_t i = 0; i < rounds; ++i) {
        for (int c = 0; c < chains; ++c) a[c] = a[c] * scale + add;
      }
      for (int c = 0; c < chains; ++c) keep += static_cast<double>(cpu::sum(a[c]));
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * chains * lanes * static_cast<double>(rounds) * threads / time.count());
  }
  return keep > 0 ? best : 0;  // used, so that the loop is not removed
}

}  // namespace

CpuDevice::CpuDevice(int threads, bool dry)
    : threads_(threads > 0 ? threads : available_threads()), dry_(dry), blocks_(std::make_unique<Blocks>()) {
  check_usage(threads >= 0, "threads = ", threads, " must be 0, for every CPU that the process may use, or positive");
}

CpuDevice::~CpuDevice() = default;

std::unique_ptr<Device> make_cpu_device(int threads, bool dry) {
  return std::make_unique<CpuDevice>(threads, dry);
}

std::string CpuDevice::describe() const {
  std::ifstream info("/proc/cpuinfo");
  std::string line, model = "CPU";
  while (std::getline(info, line)) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      model = line.substr(colon + 2);
      break;
    }
  }
  return str(model, ", ", threads_, threads_ == 1 ? " thread" : " threads");
}

Tensor CpuDevice::allocate(Kind kind, DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor t(nullptr, dtype, shape);
  memory_[static_cast<std::size_t>(kind)] += t.bytes();
  if (dry_) return t;
  t.data = blocks_->take(t.bytes());
  zero(t.as<char>(), t.bytes(), threads_);
  return t;
}

std::array<std::int64_t, kind_count> CpuDevice::memory() const {
  return memory_;
}

void CpuDevice::reserve_scratch(std::int64_t bytes) {
  reserved_ = true;
  scratch_bytes_ = bytes;
  memory_[static_cast<std::size_t>(Kind::kernel_scratch)] = bytes;
  if (!dry_) scratch_ = blocks_->take(bytes);
}

CpuDevice::Run::Run(CpuDevice& device, const char* name, double flops, double bytes, std::int64_t scratch_bytes)
    : device_(device) {
  auto& work = device.work_;
  const auto found = std::find_if(work.begin(), work.end(), [&](const auto& entry) { return entry.first == name; });
  entry_ = static_cast<std::size_t>(found - work.begin());
  if (found == work.end()) work.emplace_back(name, Work{});
  work[entry_].second.calls += 1;
  work[entry_].second.flops += flops;
  work[entry_].second.bytes += bytes;
  auto& most = device.memory_[static_cast<std::size_t>(Kind::kernel_scratch)];
  if (device.dry_) {
    most = std::max(most, scratch_bytes);
  } else if (scratch_bytes > device.scratch_bytes_) {
    check(!device.reserved_, name, " needs ", scratch_bytes, " bytes of scratch, but the dry run found ",
          device.scratch_bytes_);
    device.scratch_ = device.blocks_->take(scratch_bytes);
    device.scratch_bytes_ = most = scratch_bytes;
  }
  if (device.profile_) start_ = std::chrono::steady_clock::now();
}

CpuDevice::Run::~Run() {
  if (device_.profile_) {
    device_.work_[entry_].second.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
}

char* CpuDevice::Run::scratch() const {
  return device_.scratch_;
}

void CpuDevice::reset_work(bool profile) {
  work_.clear();
  profile_ = profile;
}

double CpuDevice::peak_flops() {
  if (peak_flops_ == 0) peak_flops_ = measure_flops(threads_);
  return peak_flops_;
}

double CpuDevice::peak_bandwidth() {
  if (peak_bandwidth_ == 0) peak_bandwidth_ = measure_bandwidth(threads_);
  return peak_bandwidth_;
}

void CpuDevice::upload(Tensor dst, const void* src) {
  expect_count("upload", "dst", dst, dst.dtype, dst.numel());
  if (!dry_ && dst.bytes() > 0) std::memcpy(dst.data, src, static_cast<std::size_t>(dst.bytes()));
}

void CpuDevice::download(void* dst, Tensor src) {
  expect_count("download", "src", src, src.dtype, src.numel());
  if (!dry_ && src.bytes() > 0) std::memcpy(dst, src.data, static_cast<std::size_t>(src.bytes()));
}

void CpuDevice::fill(Tensor dst, float value) {
  check(!dst.empty(), "fill: dst is empty");
  Run run(*this, "fill", 0, static_cast<double>(dst.bytes()));
  if (!run) return;
  switch (dst.dtype) {
    case DType::float32:
      return fill_elements(dst, value, threads_);
    case DType::float64:
      return fill_elements(dst, static_cast<double>(value), threads_);
    case DType::int32:
      return fill_elements(dst, static_cast<std::int32_t>(value), threads_);
    case DType::int64:
      return fill_elements(dst, static_cast<std::int64_t>(value), threads_);
    case DType::bfloat16: {
      bf16 stored;
      cpu::put(stored, value);
      return fill_elements(dst, stored, threads_);
    }
  }
}

void CpuDevice::copy(Tensor dst, Tensor src) {
  const auto real = [](DType t) { return t == DType::float32 || t == DType::bfloat16; };
  check(dst.rank == src.rank && dst.shape == src.shape && !dst.empty(), "copy: dst is ", dst.describe(), ", src ",
        src.describe(), "; they must have one shape");
  check(dst.dtype == src.dtype || (real(dst.dtype) && real(src.dtype)), "copy: from ", src.describe(), " to ",
        dst.describe(), "; only float32 and bfloat16 are converted");
  Run run(*this, "copy", 0, static_cast<double>(dst.bytes() + src.bytes()));
  if (!run) return;
  const Walk walk(dst, src);
  if (dst.dtype != src.dtype) {
    if (dst.dtype == DType::float32)
      copy_elements(dst.as<float>(), src.as<bf16>(), walk, threads_);
    else
      copy_elements(dst.as<bf16>(), src.as<float>(), walk, threads_);
  } else if (size_of(dst.dtype) == 2) {
    copy_elements(dst.as<std::uint16_t>(), src.as<std::uint16_t>(), walk, threads_);
  } else if (size_of(dst.dtype) == 4) {
    copy_elements(dst.as<std::uint32_t>(), src.as<std::uint32_t>(), walk, threads_);
  } else {
    copy_elements(dst.as<std::uint64_t>(), src.as<std::uint64_t>(), walk, threads_);
  }
}

}  // namespace onescale

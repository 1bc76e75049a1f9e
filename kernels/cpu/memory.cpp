// Memory, scratch and the record of work.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "kernels/cpu/cpu_device.h"
#include "kernels/error.h"

namespace onescale {

const char* name_of(Kind kind) {
  static constexpr const char* names[kind_count] = {"parameters", "gradients",      "optimizer", "activations",
                                                    "workspace",  "kernel scratch", "batches",   "transient"};
  return names[static_cast<int>(kind)];
}

struct CpuDevice::Blocks {
  std::vector<void*> pointers;
  ~Blocks() {
    for (void* p : pointers) std::free(p);
  }
  char* take(std::int64_t bytes) {
    // Large blocks ask for pages of 2 MiB: a product walks over so many pages of 4 KiB that finding them takes time.
    // The pages at the end that would not be full stay small, so that nothing is taken that is not used.
    constexpr std::size_t page = std::size_t{1} << 21;
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
    void* p = nullptr;
    check(posix_memalign(&p, size >= page ? page : 64, size) == 0, "no memory for ", bytes,
          " bytes; a smaller micro_batch, seq_len or recompute = block needs less");
    if (size >= page) madvise(p, size / page * page, MADV_HUGEPAGE);
    pointers.push_back(p);
    return static_cast<char*>(p);
  }
};

namespace {

// Zeroes in parallel, so that each thread's pages lie next to it.
void zero(char* p, std::int64_t bytes, int threads) {
  constexpr std::int64_t piece = std::int64_t{1} << 16;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t i = 0; i < bytes; i += piece)
    std::memset(p + i, 0, static_cast<std::size_t>(std::min(piece, bytes - i)));
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

int available_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  return count > 0 ? count : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
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
  if (device.profile_ || device.trace_) start_ = std::chrono::steady_clock::now();
}

CpuDevice::Run::~Run() {
  if (device_.profile_ || device_.trace_) {
    const auto now = std::chrono::steady_clock::now();
    device_.work_[entry_].second.seconds += std::chrono::duration<double>(now - start_).count();
    const auto seconds = [](auto time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); };
    if (device_.trace_) device_.trace_(device_.work_[entry_].first.c_str(), seconds(start_), seconds(now));
  }
  if (device_.after_each_) device_.after_each_();
}

char* CpuDevice::Run::scratch() const {
  return device_.scratch_;
}

void CpuDevice::reset_work(bool profile) {
  work_.clear();
  profile_ = profile;
}

}  // namespace onescale

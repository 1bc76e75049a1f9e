// Memory, scratch and the reports of operations.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/loops.h"
#include "kernels/error.h"

namespace onescale::cpu::inline ONESCALE_ISA {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

char* CpuDevice::take(std::int64_t bytes) {
  // Large blocks ask for pages of 2 MiB: a product walks over so many pages of 4 KiB that finding them takes time.
  // The pages at the end that would not be full stay small, so that nothing is taken that is not used.
  constexpr std::size_t page = std::size_t{1} << 21;
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* p = nullptr;
  check(posix_memalign(&p, size >= page ? page : 64, size) == 0, "no memory for ", bytes,
        " bytes; a smaller micro_batch, seq_len or recompute = block needs less");
  blocks_.emplace_back(p, std::free);
  if (size >= page) madvise(p, size / page * page, MADV_HUGEPAGE);
  return static_cast<char*>(p);
}

CpuDevice::CpuDevice(int threads, bool dry) : threads_(threads > 0 ? threads : available_threads()), dry_(dry) {
  check_usage(threads >= 0, "threads = ", threads, " must be 0, for every CPU that the process may use, or positive");
}

std::unique_ptr<Device> make_device(int threads, bool dry) {
  return std::make_unique<CpuDevice>(threads, dry);
}

std::string CpuDevice::describe() const {
  std::ifstream info("/proc/cpuinfo");
  std::string line, model = "CPU";
  while (std::getline(info, line) && !line.starts_with("model name")) continue;
  if (const auto colon = line.find(": "); info && colon != std::string::npos) model = line.substr(colon + 2);
  const char* const level = register_bytes == 32       ? "x86-64-v3"
                            : bf16_ == Bf16::converted ? "x86-64-v4"
                            : bf16_ == Bf16::vectors   ? "x86-64-v4 with AVX512_BF16"
                                                       : "x86-64-v4 with AMX";
  return str(model, ", ", level, ", ", threads_, threads_ == 1 ? " thread" : " threads");
}

Tensor CpuDevice::allocate(Kind kind, DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor t(nullptr, dtype, shape);
  memory_[static_cast<std::size_t>(kind)] += t.bytes();
  if (dry_) return t;
  t.data = take(t.bytes());
  zero(t.as<char>(), t.bytes(), threads_);  // in parallel, so that each thread's pages lie next to it
  return t;
}

void CpuDevice::reserve_scratch(std::int64_t bytes) {
  reserved_ = true;
  scratch_bytes_ = bytes;
  memory_[static_cast<std::size_t>(Kind::kernel_scratch)] = bytes;
  if (!dry_) scratch_ = take(bytes);
}

CpuDevice::Run::Run(CpuDevice& device, const char* name, Amount flops, Amount bytes, std::int64_t scratch_bytes)
    : device_(device), operation_{name, 0, 0, flops.value, bytes.value} {
  auto& most = device.memory_[static_cast<std::size_t>(Kind::kernel_scratch)];
  if (device.dry_) {
    most = std::max(most, scratch_bytes);
  } else if (scratch_bytes > device.scratch_bytes_) {
    check(!device.reserved_, name, " needs ", scratch_bytes, " bytes of scratch, but the dry run found ",
          device.scratch_bytes_);
    device.scratch_ = device.take(scratch_bytes);
    device.scratch_bytes_ = most = scratch_bytes;
  }
  if (device.trace_) operation_.begin = now();
}

CpuDevice::Run::~Run() {
  if (device_.trace_) {
    operation_.end = now();
    device_.trace_(operation_);
  }
  if (device_.after_each_) device_.after_each_();
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

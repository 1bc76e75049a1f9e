// What is the same for all devices, and the choice of the CPU device's instruction level.
#include "kernels/device.h"

#include <omp.h>

#include "kernels/error.h"

namespace onescale {

namespace cpu {
// kernels/cpu, compiled for each level.
namespace v3 {
std::unique_ptr<Device> make_device(int threads, bool dry);
}
namespace v4 {
std::unique_ptr<Device> make_device(int threads, bool dry);
}
}  // namespace cpu

const char* name_of(Kind kind) {
  static constexpr const char* names[kind_count] = {"parameters", "gradients",      "optimizer", "activations",
                                                    "workspace",  "kernel scratch", "batches",   "transient"};
  return names[static_cast<int>(kind)];
}

int available_threads() {
  return omp_get_num_procs();
}

std::vector<std::string> cpu_levels() {
  std::vector<std::string> levels;
  if (__builtin_cpu_supports("x86-64-v3")) levels.emplace_back("v3");
  if (__builtin_cpu_supports("x86-64-v4")) levels.emplace_back("v4");
  return levels;
}

std::unique_ptr<Device> make_cpu_device(int threads, bool dry, const std::string& isa) {
  const std::vector<std::string> levels = cpu_levels();
  check(!levels.empty(),
        "this processor lacks instructions of x86-64-v3 (AVX2, FMA), which is the least that onescale computes with; "
        "use one made since 2015");
  const std::string& level = isa == "auto" ? levels.back() : isa;
  check_usage(level == "v3" || level == "v4", "isa ", isa, " is none of auto, v3, v4");
  check_usage(level == "v3" || levels.size() == 2, "isa ", isa,
              ": this processor lacks instructions of x86-64-v4 (AVX-512); give --isa v3 or auto");
  return level == "v4" ? cpu::v4::make_device(threads, dry) : cpu::v3::make_device(threads, dry);
}

}  // namespace onescale

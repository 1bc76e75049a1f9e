// A level without instructions for products of bfloat16.
#include "kernels/cpu/product.h"

namespace onescale::cpu::inline ONESCALE_ISA {

Bf16 fastest_bf16() {
  return Bf16::converted;
}
double multiply_pairs(Bf16) {
  return 0;
}
std::int64_t Product::pairs_scratch_bytes() const {
  return 0;
}
void Product::run_pairs(void*, const float*, bool, char*) const {}

}  // namespace onescale::cpu::inline ONESCALE_ISA

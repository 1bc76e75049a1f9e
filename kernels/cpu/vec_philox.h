// Philox on sixteen counters at once: lane l of the result is philox({counter[0][l], ..., counter[3][l]}, key), the
// same bits as the scalar function of kernels/philox.h.
#pragma once

#include "kernels/cpu/transpose.h"
#include "kernels/philox.h"

namespace onescale::cpu::inline ONESCALE_ISA {

// Of one register.
typedef std::uint64_t Wide __attribute__((vector_size(register_bytes)));

// The words of sixteen draws.
struct Philox16 {
  u16x w[4];
};

// The low halves of the lanes multiplied; the high halves are ignored.
[[gnu::always_inline]] inline Wide multiply_low(Wide a, std::uint32_t b) {
#if defined(__AVX512F__)
  return std::bit_cast<Wide>(_mm512_maskz_mul_epu32(0xff, std::bit_cast<__m512i>(a), _mm512_set1_epi64(b)));
#else
  return std::bit_cast<Wide>(_mm256_mul_epu32(std::bit_cast<__m256i>(a), _mm256_set1_epi64x(b)));
#endif
}

[[gnu::always_inline]] inline Philox16 philox16(const u16x (&counter)[4], std::uint64_t key) {
  Philox16 draw;
  for (int part = 0; part < u16x::count; ++part) {
    // The even and the odd counters, each word in the low half of a 64-bit lane; what stands in the high half takes
    // part in nothing.
    Wide c[4][2];
    for (int i = 0; i < 4; ++i) {
      c[i][0] = std::bit_cast<Wide>(counter[i].part[part]);
      c[i][1] = c[i][0] >> 32;
    }
    std::uint64_t k0 = key & 0xffffffffu, k1 = key >> 32;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Wide a = multiply_low(c[0][i], 0xD2511F53), b = multiply_low(c[2][i], 0xCD9E8D57);
        c[0][i] = (b >> 32) ^ c[1][i] ^ k0;
        c[1][i] = b;
        c[2][i] = (a >> 32) ^ c[3][i] ^ k1;
        c[3][i] = a;
      }
      k0 += 0x9E3779B9, k1 += 0xBB67AE85;  // the carry into the high half is ignored like the rest of it
    }
    for (int i = 0; i < 4; ++i) draw.w[i].part[part] = std::bit_cast<uvec>((c[i][0] & 0xffffffffu) | c[i][1] << 32);
  }
  return draw;
}

// The order of sixteen consecutive groups in the lanes of a draw from which by_element() needs the fewest moves.
inline constexpr std::uint32_t group_order[lanes] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

// The 64 words of a draw whose counter[0] is first_group + group_order, in the order of the elements they serve: lane l
// of out.w[i] is for element 4 * first_group + 16 * i + l.
[[gnu::always_inline]] inline Philox16 by_element(Philox16 draw) {
  for (int part = 0; part < u16x::count; ++part) {
    uvec w[4];
    for (int i = 0; i < 4; ++i) w[i] = draw.w[i].part[part];
    transpose_quarters(w);
    for (int i = 0; i < 4; ++i) draw.w[i].part[part] = w[i];
  }
  return draw;
}

}  // namespace onescale::cpu::inline ONESCALE_ISA

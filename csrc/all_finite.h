// Whether a tensor has NaN or infinity.
#pragma once

#include "isa.h"

namespace bitline {

struct AllFiniteKernels {
  // Whether all of x[0..n) are finite. 16 and 32 bits: `exponent` is the mask of the exponent bits, all set in NaN and infinity.
  // 8 bits: codes without their sign from `first_non_finite` on are not finite (0x7F E4M3FN, 0x7C E5M2).
  bool (*finite8)(const uint8_t* x, int64_t n, uint8_t first_non_finite);
  bool (*finite16)(const uint16_t* x, int64_t n, uint16_t exponent);
  bool (*finite32)(const uint32_t* x, int64_t n, uint32_t exponent);
};

namespace portable { extern const AllFiniteKernels all_finite_kernels; }
BITLINE_AVX2(namespace avx2 { extern const AllFiniteKernels all_finite_kernels; })
BITLINE_AVX512(namespace avx512 { extern const AllFiniteKernels all_finite_kernels; })

}  // namespace bitline

// Checks of whole tensors.
#pragma once

#include "isa.h"

namespace bitline {

struct ScanTable {
  // Whether every number of x[0..n) is finite: words of 16 or 32 bits whose exponent has this mask, or bytes of which those
  // that are not finite are `from` and more without their sign (0x7F E4M3FN, 0x7C E5M2).
  bool (*finite8)(const uint8_t* x, int64_t n, uint8_t from);
  bool (*finite16)(const uint16_t* x, int64_t n, uint16_t exponent);
  bool (*finite32)(const uint32_t* x, int64_t n, uint32_t exponent);
};

namespace portable { extern const ScanTable scan; }
BITLINE_AVX2(namespace avx2 { extern const ScanTable scan; })
BITLINE_AVX512(namespace avx512 { extern const ScanTable scan; })

}  // namespace bitline

// Codes that lie in blocks beside their scales, their bits in planes, as GGUF stores them.
#pragma once

#include "isa.h"

namespace bitline {

// Bits of all codes of a block: bytes from `at` on, in runs of `run` (8, 16, 32 or 64). Code (f * run + l) of a run is field f of
// byte l, `bits` wide (1, 2, 4 or 8), and goes to bit `left` of the code.
struct Plane {
  int32_t at, run, bits, left;
};

struct BlocksTable {
  // `count` blocks of `bytes` bytes and `size` codes each to one code a byte; a code equal to `none` becomes 0.
  void (*codes)(const uint8_t* src, int64_t count, int64_t bytes, int64_t size, const Plane* planes, int64_t plane_count, int none,
                uint8_t* dst);
};

namespace portable { extern const BlocksTable blocks; }
BITLINE_AVX2(namespace avx2 { extern const BlocksTable blocks; })
BITLINE_AVX512(namespace avx512 { extern const BlocksTable blocks; })

}  // namespace bitline

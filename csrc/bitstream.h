// Rows of codes as little-endian bit streams, and as one code a byte.
#pragma once

#include "isa.h"

namespace bitline {

inline int64_t row_bytes(int64_t k, int width) { return (k * width + 7) / 8; }

struct BitstreamTable {
  // k codes of 1 to 7 bits from row_bytes(k, width) bytes at src, one a byte. Reads and writes nothing beyond.
  void (*unpack)(const uint8_t* src, int64_t k, int width, uint8_t* dst);
  // The other way; high bits of the bytes at src are dropped, bits past the last code are zero.
  void (*pack)(const uint8_t* src, int64_t k, int width, uint8_t* dst);
};

namespace portable { extern const BitstreamTable bitstream; }
BITLINE_AVX2(namespace avx2 { extern const BitstreamTable bitstream; })
BITLINE_AVX512(namespace avx512 { extern const BitstreamTable bitstream; })

const BitstreamTable& bitstream();

}  // namespace bitline

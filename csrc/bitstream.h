// Packed codes: each row a little-endian bit stream along K (the canonical layout), and unpacked ones, one code per byte.
#pragma once

#include "isa.h"

namespace bitline {

inline int64_t row_bytes(int64_t k, int bits) { return (k * bits + 7) / 8; }

struct BitstreamKernels {
  // One row of k codes of 1 to 7 bits, row_bytes(k, bits) bytes, to one code per byte. Reads and writes nothing beyond either.
  void (*unpack)(const uint8_t* src, int64_t k, int bits, uint8_t* dst);
  // The inverse. High bits of a source byte are dropped; bits past the last code are written as zero.
  void (*pack)(const uint8_t* src, int64_t k, int bits, uint8_t* dst);
};

namespace portable { extern const BitstreamKernels bitstream_kernels; }
BITLINE_AVX2(namespace avx2 { extern const BitstreamKernels bitstream_kernels; })
BITLINE_AVX512(namespace avx512 { extern const BitstreamKernels bitstream_kernels; })

const BitstreamKernels& bitstream();

}  // namespace bitline

// GGUF's quantized blocks: codes beside their block's scales, with the bits of a code in several planes.
#pragma once

#include "isa.h"

namespace bitline {

// One plane of a block: bytes from `byte_offset` on, in runs of run_bytes (8, 16, 32 or 64). Code (f * run_bytes + i) of a run
// has bit field f of byte i, of `bits` (1, 2, 4 or 8) bits, at bit `shift` of the code. int32 fields: Python fills an array of
// them.
struct BitPlane {
  int32_t byte_offset, run_bytes, bits, shift;
};

struct GgufBlockKernels {
  // One row of num_blocks blocks, block_bytes bytes and block_codes codes each, to one code per byte. A code equal to zero_code
  // (-1: none) becomes 0.
  void (*unpack)(const uint8_t* src, int64_t num_blocks, int64_t block_bytes, int64_t block_codes, const BitPlane* planes,
                 int64_t num_planes, int zero_code, uint8_t* dst);
  // The same for codes of one plane of 4 bits, in runs of at most 32 bytes, straight to packed rows: a byte for two codes.
  void (*pack_nibbles)(const uint8_t* src, int64_t num_blocks, int64_t block_bytes, int64_t block_codes, const BitPlane& plane,
                       uint8_t* dst);
};

namespace portable { extern const GgufBlockKernels gguf_block_kernels; }
BITLINE_AVX2(namespace avx2 { extern const GgufBlockKernels gguf_block_kernels; })
BITLINE_AVX512(namespace avx512 { extern const GgufBlockKernels gguf_block_kernels; })

}  // namespace bitline

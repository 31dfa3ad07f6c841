// A packed weight back to a matrix: for gradients with respect to x.
#pragma once

#include "gemm.h"

namespace bitline {

struct GemmUnpackKernels {
  // Whether the level has exact values of the weight's codes.
  bool (*supports)(const PackedHeader& w);
  // The rows of W [n, k] of an N block, contiguous; `out`: its first element.
  void (*unpack_block)(const PackedHeader& w, int64_t block, Dtype dtype, uint8_t* out);
};

BITLINE_AVX2(namespace avx2 { extern const GemmUnpackKernels gemm_unpack_kernels; })
BITLINE_AVX512(namespace avx512 { extern const GemmUnpackKernels gemm_unpack_kernels; })
BITLINE_NEON(namespace neon { extern const GemmUnpackKernels gemm_unpack_kernels; })

}  // namespace bitline

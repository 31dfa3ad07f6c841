// GPTQ's and AWQ's qweight, codes packed in int32, to canonical rows (bitstream.h).
#pragma once

#include "isa.h"

namespace bitline {

// Where act-order takes an output code from: int32 `row` of its column, rotated left by `rotation` bits, which moves the code
// to its output bits.
struct PermutedCode {
  int32_t row;
  uint32_t rotation;
};

// Strides are in int32. Each function writes all `columns` (awq: 8 * columns) rows of dst.
struct RepackKernels {
  // dst[c, r] = src[r, c], int32 [rows, columns].
  void (*transpose)(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst, int64_t dst_stride);
  // AWQ's nibbles: src int32 [k, columns] to dst int32 [8 * columns, ceil(k / 8)].
  void (*awq)(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst, int64_t dst_stride);
  // Codes of `bits` (1, 2, 4, 8) bits along the rows of src to dst int32 [columns, k_packed], in the order of `sources`.
  void (*gptq_permuted)(const uint32_t* src, int64_t stride, const PermutedCode* sources, int bits, int64_t k_packed,
                        int64_t columns, uint32_t* dst, int64_t dst_stride);
};

namespace portable { extern const RepackKernels repack_kernels; }
BITLINE_AVX2(namespace avx2 { extern const RepackKernels repack_kernels; })
BITLINE_AVX512(namespace avx512 { extern const RepackKernels repack_kernels; })

const RepackKernels& repack();

}  // namespace bitline

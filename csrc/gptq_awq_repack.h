// GPTQ's and AWQ's qweight, codes packed in int32, to canonical rows (bitstream.h).
#pragma once

#include "isa.h"

namespace bitline {

// Strides are in int32. Each function writes all `columns` (awq: 8 * columns) rows of dst.
struct RepackKernels {
  // dst[c, r] = src[r, c], int32 [rows, columns].
  void (*transpose)(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst, int64_t dst_stride);
  // The same for a dst that stays in cache.
  void (*transpose_in_cache)(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst,
                             int64_t dst_stride);
  // AWQ's nibbles: src int32 [k, columns] to dst int32 [8 * columns, ceil(k / 8)].
  void (*awq)(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst, int64_t dst_stride);
  // Codes of `bits` (1, 2, 4, 8) bits along the rows of src to dst int32 [columns, k_packed]; code j is code perm[j] of the
  // column. panels: scratch, permuted_bytes.
  void (*gptq_permuted)(const uint32_t* src, int64_t stride, const int32_t* perm, int bits, int64_t k_packed, int64_t columns,
                        uint8_t* panels, uint32_t* dst, int64_t dst_stride);
};

namespace portable { extern const RepackKernels repack_kernels; }
BITLINE_AVX2(namespace avx2 { extern const RepackKernels repack_kernels; })
BITLINE_AVX512(namespace avx512 { extern const RepackKernels repack_kernels; })

const RepackKernels& repack();

// Scratch of gptq_permuted: 32 bytes for each column of K and each panel of columns.
inline int64_t permuted_bytes(int64_t k, int bits, int64_t columns) {
  const int64_t panel = bits == 8 ? 32 : 64;
  return 32 * k * ((columns + panel - 1) / panel);
}

}  // namespace bitline

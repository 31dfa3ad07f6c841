// Codes in 32-bit words, as GPTQ and AWQ pack them, to rows of the canonical bit stream.
#pragma once

#include "isa.h"

namespace bitline {

// A column's field k is in word `row` of the column; turned left by `turn` bits it is where output field k belongs.
struct Field {
  int32_t row;
  uint32_t turn;
};

// Strides are in words. Each writes all `columns` (awq: 8 * columns) rows of dst.
struct WordsTable {
  // dst[c, r] = src[r, c], of rows × columns words.
  void (*transpose)(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst, int64_t dst_stride);
  // AWQ's nibbles: src [k, columns] to dst [8 * columns, ceil(k / 8)].
  void (*awq)(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst, int64_t dst_stride);
  // Codes of `width` (1, 2, 4, 8) bits along the rows of src to dst [columns, words], in the order that `fields` has.
  void (*ordered)(const uint32_t* src, int64_t stride, const Field* fields, int width, int64_t words, int64_t columns,
                  uint32_t* dst, int64_t dst_stride);
};

namespace portable { extern const WordsTable words; }
BITLINE_AVX2(namespace avx2 { extern const WordsTable words; })
BITLINE_AVX512(namespace avx512 { extern const WordsTable words; })

const WordsTable& words();

}  // namespace bitline

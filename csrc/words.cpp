#include "words.h"

#include <stdlib.h>
#include <string.h>

#include "parallel.h"

namespace bitline {

const WordsTable& words() {
  static constexpr const WordsTable* tables[kLevels] = {&portable::words, BITLINE_AVX2_TABLE(&avx2::words),
                                                        BITLINE_AVX512_TABLE(&avx512::words), nullptr};
  return pick(tables);
}

namespace {

// Columns of one task: a few cache lines of each row, so that memory is read in runs.
constexpr int64_t kSlab = 128;

}  // namespace
}  // namespace bitline

using namespace bitline;

// dst [columns, rows] = the transpose of src [rows, columns], words of 32 bits; strides in words.
BITLINE_EXPORT void bitline_transpose_words(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst,
                                            int64_t dst_stride) {
  const WordsTable& f = bitline::words();
  parallel_ranges(columns, kSlab, [&](int64_t begin, int64_t end) {
    f.transpose(src + begin, stride, rows, end - begin, dst + begin * dst_stride, dst_stride);
  });
}

// AWQ's 4-bit words src [k, columns] to rows of 8 codes a word, dst [8 * columns, ceil(k / 8)]; bits past k are zero.
BITLINE_EXPORT void bitline_awq_codes(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst,
                                      int64_t dst_stride) {
  const WordsTable& f = bitline::words();
  parallel_ranges(columns, kSlab / 2, [&](int64_t begin, int64_t end) {
    f.awq(src + begin, stride, k, end - begin, dst + 8 * begin * dst_stride, dst_stride);
  });
}

// GPTQ's words src [k * width / 32, columns], width 1, 2, 4 or 8, to dst [columns, k * width / 32] whose code j is code perm[j].
// k * width is a multiple of 32, every perm[j] is within [0, k). Returns -1 where there is no memory, else 0.
BITLINE_EXPORT int bitline_ordered_words(const uint32_t* src, int64_t stride, const int32_t* perm, int64_t k, int width,
                                         int64_t columns, uint32_t* dst, int64_t dst_stride) {
  const int per = 32 / width;
  Field* fields = static_cast<Field*>(malloc(size_t(k) * sizeof(Field)));
  if (fields == nullptr) return -1;
  for (int64_t j = 0; j < k; ++j) {
    const int from = perm[j] % per, to = int(j % per);
    fields[j] = {perm[j] / per, uint32_t((to - from + per) % per * width)};
  }
  const WordsTable& f = bitline::words();
  // Every word of a task's columns is read `per` times in no order. They are copied side by side into a part that a core's own
  // cache holds: where rows lie a power of two apart, they would otherwise push each other out of it.
  const int64_t words = k / per;
  int64_t slab = kSlab;
  while (slab > 16 && slab * words * 4 > (256 << 10)) slab /= 2;
  int failed = 0;
  parallel_ranges(columns, slab, [&](int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    uint32_t* part = static_cast<uint32_t*>(malloc(size_t(words * n) * 4));
    if (part == nullptr) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t r = 0; r < words; ++r) memcpy(part + r * n, src + r * stride + begin, size_t(n) * 4);
    f.ordered(part, n, fields, width, words, n, dst + begin * dst_stride, dst_stride);
    free(part);
  });
  free(fields);
  return failed;
}

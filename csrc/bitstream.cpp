#include "bitstream.h"

#include <stdlib.h>
#include <string.h>

#include "parallel.h"

namespace bitline {

const BitstreamTable& bitstream() {
  static constexpr const BitstreamTable* tables[kLevels] = {&portable::bitstream, BITLINE_AVX2_TABLE(&avx2::bitstream),
                                                            BITLINE_AVX512_TABLE(&avx512::bitstream), nullptr};
  return pick(tables);
}

namespace {

// Rows of one task: about 128 KiB of codes as bytes.
int64_t rows_of_task(int64_t k) { return k < (1 << 17) ? (1 << 17) / (k + 1) + 1 : 1; }

}  // namespace
}  // namespace bitline

using namespace bitline;

// Packed rows, `stride` bytes apart, to one code a byte, dst [rows, k]. width: 1 to 7.
BITLINE_EXPORT void bitline_unpack(const uint8_t* src, int64_t stride, int64_t rows, int64_t k, int width, uint8_t* dst) {
  const auto unpack = bitstream().unpack;
  parallel_ranges(rows, rows_of_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) unpack(src + r * stride, k, width, dst + r * k);
  });
}

// One code a byte, rows `stride` bytes apart, to packed rows, dst [rows, row_bytes(k, width)]. width: 1 to 7.
BITLINE_EXPORT void bitline_pack(const uint8_t* src, int64_t stride, int64_t rows, int64_t k, int width, uint8_t* dst) {
  const auto pack = bitstream().pack;
  parallel_ranges(rows, rows_of_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) pack(src + r * stride, k, width, dst + r * row_bytes(k, width));
  });
}

// Columns `index` [count] of packed rows of k columns, dst [rows, row_bytes(count, width)]. width: 1 to 8.
// Returns 0; -1 where an index is outside [0, k); -2 where there is no memory.
BITLINE_EXPORT int bitline_take(const uint8_t* src, int64_t stride, int64_t rows, int64_t k, int width, const int64_t* index,
                                int64_t count, uint8_t* dst) {
  for (int64_t i = 0; i < count; ++i)
    if (index[i] < 0 || index[i] >= k) return -1;
  const BitstreamTable& f = bitstream();
  int failed = 0;
  parallel_ranges(rows, rows_of_task(k > count ? k : count), [&](int64_t begin, int64_t end) {
    uint8_t* room = static_cast<uint8_t*>(malloc(size_t(k + count)));
    if (room == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    uint8_t* taken = room + k;
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* codes = src + r * stride;
      uint8_t* to = dst + r * row_bytes(count, width);
      if (width < 8) f.unpack(codes, k, width, room), codes = room;
      if (width == 8) taken = to;
      for (int64_t i = 0; i < count; ++i) taken[i] = codes[index[i]];
      if (width < 8) f.pack(taken, count, width, to);
    }
    free(room);
  });
  return failed;
}

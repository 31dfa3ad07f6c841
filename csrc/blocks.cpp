#include "blocks.h"

#include <stdlib.h>
#include <string.h>

#include "bitstream.h"
#include "parallel.h"

namespace bitline {
namespace {

const BlocksTable& table() {
  static constexpr const BlocksTable* tables[kLevels] = {&portable::blocks, BITLINE_AVX2_TABLE(&avx2::blocks),
                                                         BITLINE_AVX512_TABLE(&avx512::blocks), nullptr};
  return pick(tables);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Rows of `count` blocks of `bytes` bytes and `size` codes each, rows `stride` bytes apart, to packed rows, dst
// [rows, row_bytes(count * size, width)]. planes: each four int32 (Plane); together they fill `width` (1 to 8) bits. none: a
// code that becomes 0, or -1. Returns 0, or -2 where there is no memory.
BITLINE_EXPORT int bitline_block_codes(const uint8_t* src, int64_t stride, int64_t rows, int64_t count, int64_t bytes,
                                       int64_t size, const void* planes, int64_t plane_count, int width, int none, uint8_t* dst) {
  const Plane* all = static_cast<const Plane*>(planes);
  const int64_t k = count * size, row = row_bytes(k, width), grain = k < (1 << 17) ? (1 << 17) / (k + 1) + 1 : 1;
  const auto codes = table().codes;
  const auto pack = bitstream().pack;
  int failed = 0;
  parallel_ranges(rows, grain, [&](int64_t begin, int64_t end) {
    uint8_t* room = width == 8 ? nullptr : static_cast<uint8_t*>(malloc(size_t(k)));
    if (width < 8 && room == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t r = begin; r < end; ++r) {
      uint8_t* to = width == 8 ? dst + r * row : room;
      codes(src + r * stride, count, bytes, size, all, plane_count, none, to);
      if (width < 8) pack(room, k, width, dst + r * row);
    }
    free(room);
  });
  return failed;
}

#include "int4pack.h"

#include <stdlib.h>
#include <string.h>

#include "bitstream.h"
#include "parallel.h"
#include "words.h"

namespace bitline {
namespace {

const Int4PackTable& table() {
  static constexpr const Int4PackTable* tables[kLevels] = {&portable::int4pack, BITLINE_AVX2_TABLE(&avx2::int4pack), nullptr,
                                                           nullptr};
  return pick(tables);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Packed rows of codes, `stride` bytes apart, to torch's layout, dst [n_pad / block, planes * k_pad, block / 2]. A code
// becomes (code ^ flip) + add modulo 256, or map[code] where a map of 16 is given; with two planes the high nibbles of that
// come before the low ones. What lies past n and k is zero. k_pad is a multiple of 32, n_pad
// one of block, which is 64 or 32.
BITLINE_EXPORT void bitline_int4pack(const uint8_t* src, int64_t stride, int64_t n, int64_t k, int width, int flip, int add,
                                     const uint8_t* map, int planes, int64_t n_pad, int64_t k_pad, const int* order,
                                     uint8_t* dst) {
  const NibbleLayout layout{order[0], order[1], order[2], order[3], order[4]};
  const Int4PackTable& f = table();
  const auto unpack = bitstream().unpack;
  const int64_t half = layout.block / 2;
  const bool as_it_is = width == 4 && planes == 1 && map == nullptr && add == 0;
  parallel_for(n_pad / layout.block, [&](int64_t block) {
    const int64_t first = block * layout.block, rows = n - first < layout.block ? n - first : layout.block;  // perhaps none
    uint8_t nibbles[2][kMostRows4 * kChunk / 2], codes[kChunk];
    memset(nibbles, 0, sizeof nibbles);
    for (int64_t at = 0; at < k_pad; at += kChunk) {
      const int64_t count = k - at < kChunk ? (k - at > 0 ? k - at : 0) : kChunk, padded = k_pad - at < kChunk ? k_pad - at : kChunk;
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* from = src + (first + r) * stride + at / 8 * width;
        uint8_t* to = nibbles[0] + r * (kChunk / 2);
        for (int64_t next = kChunk * width / 8; next < kChunk * width / 4; next += 64) __builtin_prefetch(from + next, 0, 2);
        if (as_it_is && count % 2 == 0) {
          memcpy(to, from, size_t(count / 2));
          if (flip != 0)
            for (int64_t i = 0; i < count / 2; ++i) to[i] ^= uint8_t(flip * 0x11);
          memset(to + count / 2, 0, size_t(padded - count) / 2);
          continue;
        }
        if (width == 8)
          memcpy(codes, from, size_t(count));
        else
          unpack(from, count, width, codes);
        f.change(codes, count, uint8_t(flip), uint8_t(add), map);
        memset(codes + count, 0, size_t(padded - count));
        f.nibbles(codes, padded, planes == 2 ? 4 : 0, to);
        if (planes == 2) f.nibbles(codes, padded, 0, nibbles[1] + r * (kChunk / 2));
      }
      for (int p = 0; p < planes; ++p) f.lay(nibbles[p], padded, layout, dst + ((block * planes + p) * k_pad + at) * half);
    }
  });
}

// Scales of that layout, dst bfloat16 [planes * columns, n_pad, 2]: s = scale * step rounded, and what is added, z = s * (center -
// zero), or exact * (step * center) + offset. scale, zero, offset: [rows, groups] float32, uint8 or null, float32 or null. Row i
// uses the scales of row (i + row_offset) / row_block, column j those of group pick[j]. With two planes the first one's are
// 16 s and 8 s. Rows past n are left as they are. Returns 0, or -2 where there is no memory.
BITLINE_EXPORT int bitline_int4pack_scales(const float* scale, const uint8_t* zero, const float* offset, int64_t groups, int64_t n,
                                            int64_t n_pad, int64_t row_block, int64_t row_offset, const int64_t* pick,
                                            int64_t columns, double step, int center, int planes, uint32_t* dst) {
  const Int4PackTable& f = table();
  const auto transpose = words().transpose;
  const ScaleRow row{float(step), float(step * center), float(center), pick, columns};
  constexpr int64_t kRows = 64;
  int failed = 0;
  parallel_ranges(n, kRows, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    uint32_t* pairs = static_cast<uint32_t*>(malloc(size_t(2 * count * columns) * 4));
    if (pairs == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    uint32_t* high = pairs + count * columns;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (begin + i + row_offset) / row_block * groups;
      f.scales(row, scale + at, zero == nullptr ? nullptr : zero + at, offset == nullptr ? nullptr : offset + at, pairs + i * columns,
               planes == 2 ? high + i * columns : nullptr);
    }
    transpose(pairs, columns, count, columns, dst + (planes - 1) * columns * n_pad + begin, n_pad);
    if (planes == 2) transpose(high, columns, count, columns, dst + begin, n_pad);
    free(pairs);
  });
  return failed;
}

#include "int4pack.h"

#include <string.h>

#include "bitstream.h"
#include "parallel.h"

namespace bitline {
namespace {

const Int4PackTable& table() {
  static constexpr const Int4PackTable* tables[kLevels] = {&portable::int4pack, BITLINE_AVX2_TABLE(&avx2::int4pack), nullptr,
                                                           nullptr};
  return pick(tables);
}

// To bfloat16, to nearest and even.
uint32_t rounded(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7FC0;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

float widened(uint32_t half) {
  const uint32_t bits = half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
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
// 16 s and 8 s.
BITLINE_EXPORT void bitline_int4pack_scales(const float* scale, const uint8_t* zero, const float* offset, int64_t groups, int64_t n,
                                            int64_t n_pad, int64_t row_block, int64_t row_offset, const int64_t* pick,
                                            int64_t columns, double step, int center, int planes, uint16_t* dst) {
  const float by = float(step), middle = float(step * center);
  parallel_ranges(n_pad, 64, [&](int64_t begin, int64_t end) {
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = begin; i < end; ++i) {
        uint32_t first = 0, second = 0, high_first = 0, high_second = 0;
        if (i < n) {
          const int64_t cell = (i + row_offset) / row_block * groups + pick[j];
          first = rounded(scale[cell] * by);
          const float s = widened(first);
          const float z = offset != nullptr ? scale[cell] * middle + offset[cell]
                          : zero != nullptr ? s * (float(center) - float(zero[cell]))
                                            : s * float(center);
          second = rounded(z);
          high_first = rounded(16 * s), high_second = rounded(8 * s);
        }
        uint16_t* to = dst + 2 * (((planes - 1) * columns + j) * n_pad + i);
        to[0] = uint16_t(first), to[1] = uint16_t(second);
        if (planes == 2) {
          to = dst + 2 * (j * n_pad + i);
          to[0] = uint16_t(high_first), to[1] = uint16_t(high_second);
        }
      }
    }
  });
}

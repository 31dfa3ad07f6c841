#include "int4pack.h"

#include <stdlib.h>
#include <string.h>

#include "bitstream.h"
#include "gptq_awq_repack.h"
#include "parallel.h"

namespace bitline {
namespace {

const Int4PackKernels& kernels() {
  static constexpr const Int4PackKernels* by_level[kNumLevels] = {
      &portable::int4pack_kernels, BITLINE_AVX2_KERNELS(&avx2::int4pack_kernels), nullptr, nullptr};
  return dispatch(by_level);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Packed rows of `bits`-bit codes, `stride` bytes apart, to torch's layout, dst uint8 [n_pad / rows, planes * k_pad, rows / 2]
// with nibble_order = NibbleOrder as five ints. A code becomes (code ^ flip) + add modulo 256, or lut[code] where a table of 16
// is given; with two planes the high nibbles of the result come before the low ones. Padding of n and k is zero. k_pad is a
// multiple of 32, n_pad one of `rows`, which is 64 or 32.
BITLINE_EXPORT void bitline_int4pack_codes(const uint8_t* src, int64_t stride, int64_t n, int64_t k, int bits, int flip, int add,
                                           const uint8_t* lut, int planes, int64_t n_pad, int64_t k_pad, const int* nibble_order,
                                           uint8_t* dst) {
  const NibbleOrder order{nibble_order[0], nibble_order[1], nibble_order[2], nibble_order[3], nibble_order[4]};
  const Int4PackKernels& kernel = kernels();
  const auto unpack = bitstream().unpack;
  const int64_t half = order.rows / 2;
  const bool already_nibbles = bits == 4 && planes == 1 && lut == nullptr && add == 0;
  parallel_for(n_pad / order.rows, [&](int64_t block) {
    const int64_t first = block * order.rows;
    const int64_t rows = n - first < order.rows ? n - first : order.rows;  // <= 0 in a block of padding
    uint8_t nibbles[2][kMaxBlockRows * kChunkCodes / 2], codes[kChunkCodes];
    memset(nibbles, 0, sizeof nibbles);
    for (int64_t at = 0; at < k_pad; at += kChunkCodes) {
      const int64_t count = k - at < kChunkCodes ? (k - at > 0 ? k - at : 0) : kChunkCodes;
      const int64_t padded = k_pad - at < kChunkCodes ? k_pad - at : kChunkCodes;
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* from = src + (first + r) * stride + at / 8 * bits;
        uint8_t* to = nibbles[0] + r * (kChunkCodes / 2);
        for (int64_t ahead = kChunkCodes * bits / 8; ahead < kChunkCodes * bits / 4; ahead += 64)
          __builtin_prefetch(from + ahead, 0, 2);
        if (already_nibbles && count % 2 == 0) {
          memcpy(to, from, size_t(count / 2));
          if (flip != 0)
            for (int64_t i = 0; i < count / 2; ++i) to[i] ^= uint8_t(flip * 0x11);
          memset(to + count / 2, 0, size_t(padded - count) / 2);
          continue;
        }
        if (bits == 8)
          memcpy(codes, from, size_t(count));
        else
          unpack(from, count, bits, codes);
        kernel.map_codes(codes, count, uint8_t(flip), uint8_t(add), lut);
        memset(codes + count, 0, size_t(padded - count));
        kernel.pack_nibbles(codes, padded, planes == 2 ? 4 : 0, to);
        if (planes == 2) kernel.pack_nibbles(codes, padded, 0, nibbles[1] + r * (kChunkCodes / 2));
      }
      for (int p = 0; p < planes; ++p)
        kernel.interleave(nibbles[p], padded, order, dst + ((block * planes + p) * k_pad + at) * half);
    }
  });
}

// Scales of that layout, dst bfloat16 [planes * columns, n_pad, 2] of (s, z): s = scale * step, rounded, and the addend z = s *
// (center - zero), or scale * (step * center) + offset. scale, zero, offset: [rows, groups] float32, uint8 or null, float32 or
// null. Row i uses the scales of row (i + row_offset) / row_block, column j those of group group[j]. With two planes the first
// one's are 16 s and 8 s. Rows past n are not written. Returns 0; -2: no memory.
BITLINE_EXPORT int bitline_int4pack_scales(const float* scale, const uint8_t* zero, const float* offset, int64_t groups,
                                           int64_t n, int64_t n_pad, int64_t row_block, int64_t row_offset,
                                           const int64_t* group, int64_t columns, double step, int center, int planes,
                                           uint32_t* dst) {
  const Int4PackKernels& kernel = kernels();
  const auto transpose = repack().transpose;
  const ScaleConversion conversion{float(step), float(step * center), float(center), group, columns};
  constexpr int64_t kRowsPerTask = 64;
  int failed = 0;
  parallel_for_chunks(n, kRowsPerTask, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    uint32_t* pairs = static_cast<uint32_t*>(malloc(size_t(2 * count * columns) * 4));
    if (pairs == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    uint32_t* high_pairs = pairs + count * columns;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (begin + i + row_offset) / row_block * groups;
      kernel.scale_pairs(conversion, scale + at, zero == nullptr ? nullptr : zero + at, offset == nullptr ? nullptr : offset + at,
                         pairs + i * columns, planes == 2 ? high_pairs + i * columns : nullptr);
    }
    transpose(pairs, columns, count, columns, dst + (planes - 1) * columns * n_pad + begin, n_pad);
    if (planes == 2) transpose(high_pairs, columns, count, columns, dst + begin, n_pad);
    free(pairs);
  });
  return failed;
}

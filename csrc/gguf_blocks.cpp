#include "gguf_blocks.h"

#include <stdlib.h>
#include <string.h>

#include "bitstream.h"
#include "parallel.h"

namespace bitline {
namespace {

const GgufBlockKernels& kernels() {
  static constexpr const GgufBlockKernels* by_level[kNumLevels] = {&portable::gguf_block_kernels,
                                                                   BITLINE_AVX2_KERNELS(&avx2::gguf_block_kernels),
                                                                   BITLINE_AVX512_KERNELS(&avx512::gguf_block_kernels), nullptr};
  return dispatch(by_level);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Rows of num_blocks GGUF blocks (block_bytes bytes, block_codes codes each), `stride` bytes apart, to packed rows
// uint8 [rows, row_bytes(num_blocks * block_codes, bits)]. planes: BitPlane [num_planes], together `bits` (1 to 8) bits.
// zero_code: a code that becomes 0, or -1. Returns 0; -2: no memory.
BITLINE_EXPORT int bitline_repack_gguf_blocks(const uint8_t* src, int64_t stride, int64_t rows, int64_t num_blocks,
                                              int64_t block_bytes, int64_t block_codes, const void* planes,
                                              int64_t num_planes, int bits, int zero_code, uint8_t* dst) {
  const BitPlane* bit_planes = static_cast<const BitPlane*>(planes);
  const int64_t k = num_blocks * block_codes, row = row_bytes(k, bits), grain = k < (1 << 17) ? (1 << 17) / (k + 1) + 1 : 1;
  const bool nibbles = bits == 4 && num_planes == 1 && zero_code < 0 && bit_planes->run_bytes <= 32;
  const auto pack_nibbles = kernels().pack_nibbles;
  const auto unpack = kernels().unpack;
  const auto pack = bitstream().pack;
  int failed = 0;
  parallel_for_chunks(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; nibbles && r < end; ++r)
      pack_nibbles(src + r * stride, num_blocks, block_bytes, block_codes, bit_planes[0], dst + r * row);
    if (nibbles) return;
    uint8_t* unpacked = bits == 8 ? nullptr : static_cast<uint8_t*>(malloc(size_t(k)));
    if (bits < 8 && unpacked == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t r = begin; r < end; ++r) {
      uint8_t* codes = bits == 8 ? dst + r * row : unpacked;
      unpack(src + r * stride, num_blocks, block_bytes, block_codes, bit_planes, num_planes, zero_code, codes);
      if (bits < 8) pack(unpacked, k, bits, dst + r * row);
    }
    free(unpacked);
  });
  return failed;
}

// The scales of Q4_K's and Q5_K's blocks (16 bytes at the beginning of each of num_blocks blocks of a row), as rows: scale and
// minimum uint8 [rows, 8 * num_blocks], six bits each; super_scale and super_minimum float16 [rows, num_blocks].
BITLINE_EXPORT void bitline_unpack_gguf_scales(const uint8_t* src, int64_t stride, int64_t rows, int64_t num_blocks,
                                               int64_t block_bytes, uint8_t* scale, uint8_t* minimum, uint16_t* super_scale,
                                               uint16_t* super_minimum) {
  constexpr uint32_t kSix = 0x3F3F3F3F, kFour = 0x0F0F0F0F, kTwo = 0x30303030;  // four bytes at once
  constexpr int64_t kBlocksPerTask = 4096;
  parallel_for_chunks(rows, kBlocksPerTask / (num_blocks + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t b = 0; b < num_blocks; ++b) {
        const uint8_t* block = src + r * stride + b * block_bytes;
        const int64_t at = r * num_blocks + b;
        uint32_t six[3];
        memcpy(super_scale + at, block, 2);
        memcpy(super_minimum + at, block + 2, 2);
        memcpy(six, block + 4, sizeof six);
        const uint32_t scales[2] = {six[0] & kSix, (six[2] & kFour) | (six[0] >> 2 & kTwo)};
        const uint32_t minima[2] = {six[1] & kSix, (six[2] >> 4 & kFour) | (six[1] >> 2 & kTwo)};
        memcpy(scale + 8 * at, scales, sizeof scales);
        memcpy(minimum + 8 * at, minima, sizeof minima);
      }
    }
  });
}

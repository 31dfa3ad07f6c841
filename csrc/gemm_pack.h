// Rows of codes to the K blocks of a packed weight (packed_weight.h).
#pragma once

#include "packed_weight.h"

namespace bitline {

constexpr int kPackKBlocks = 16;  // K blocks laid out at a time
constexpr int kMaxInt32 = 5;      // int32 of a row in a K block
constexpr int kMaxBitMoves = 64;

// Bits of source int32 `source` of a K block that move by the same distance: `shift` to the left, or -shift to the right.
struct BitMove {
  int source, shift;
  uint32_t mask;  // where they end up
};

// How the int32 of a K block are made from a row's bit stream: moves [first_move[i], first_move[i + 1]) make int32 i.
struct KBlockPlan {
  int first_move[kMaxInt32 + 1];
  BitMove moves[kMaxBitMoves];
};

constexpr int int32_per_k_block(int bits) { return int(k_block_of(bits)) * bits / 32; }

constexpr KBlockPlan plan_of(int bits) {
  KBlockPlan plan = {};
  const int columns = int(k_block_of(bits));
  int count = 0;
  for (int i = 0; i < int32_per_k_block(bits); ++i) {
    const int first = plan.first_move[i] = count;
    for (int bit = 0; bit < columns * bits; ++bit) {
      const BitPosition to = bit_position(bits, bit / bits, bit % bits);
      if (to.index != i) continue;
      const int source = bit / 32, shift = to.bit - bit % 32;
      int m = first;
      while (m < count && (plan.moves[m].source != source || plan.moves[m].shift != shift)) ++m;
      if (m == count) plan.moves[count++] = {source, shift, 0};
      plan.moves[m].mask |= 1u << to.bit;
    }
  }
  plan.first_move[int32_per_k_block(bits)] = count;
  return plan;
}

struct GemmPackKernels {
  // K blocks of 32 rows of `bits`-bit codes, `stride` bytes apart, to dst [k_blocks * int32_per_k_block][32]. flip: XORed to the
  // int32 of a row's K block before. Whole chunks of kPackKBlocks K blocks of each row must be readable.
  void (*pack_k_blocks)(const uint8_t* src, int64_t stride, int64_t k_blocks, int bits, const uint32_t* flip, uint32_t* dst);
};

namespace portable { extern const GemmPackKernels gemm_pack_kernels; }
BITLINE_AVX2(namespace avx2 { extern const GemmPackKernels gemm_pack_kernels; })
BITLINE_AVX512(namespace avx512 { extern const GemmPackKernels gemm_pack_kernels; })

}  // namespace bitline

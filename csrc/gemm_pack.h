// Rows of codes to the K blocks of a packed weight (packed_weight.h).
#pragma once

#include "packed_weight.h"

namespace bitline {

constexpr int kPackKBlocks = 16;  // K blocks laid out at a time
constexpr int kMaxInt32 = 5;      // int32 of a row in a K block
constexpr int kMaxBitMoves = 80;

// Bits of source int32 `source` of a K block that move by the same distance: `shift` to the left, or -shift to the right.
struct BitMove {
  int32_t source, shift;
  uint32_t mask;  // where they end up
};

// How the int32 of a K block are made from a row's bit stream: moves [first_move[i], first_move[i + 1]) make int32 i, those with
// shift >= 0 before first_right[i].
struct KBlockPlan {
  int int32_count;
  int first_move[kMaxInt32 + 1], first_right[kMaxInt32];
  uint32_t flip[kMaxInt32];  // XORed to the source int32 before
  BitMove moves[kMaxBitMoves];
};

struct GemmPackKernels {
  // Up to kPackKBlocks K blocks of 32 rows, `stride` bytes apart, to dst [k_blocks * int32_count][32]. kPackKBlocks * int32_count
  // int32 of each row must be readable.
  void (*pack_k_blocks)(const uint8_t* src, int64_t stride, int64_t k_blocks, const KBlockPlan& plan, uint32_t* dst);
};

namespace portable { extern const GemmPackKernels gemm_pack_kernels; }
BITLINE_AVX2(namespace avx2 { extern const GemmPackKernels gemm_pack_kernels; })
BITLINE_AVX512(namespace avx512 { extern const GemmPackKernels gemm_pack_kernels; })

}  // namespace bitline

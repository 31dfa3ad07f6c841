// Rows of codes to the packed weight of gemm.h.
#pragma once

#include "isa.h"

namespace bitline {

constexpr int kPackRows = 32;   // rows of a block
constexpr int kPackSteps = 16;  // steps laid out at a time
constexpr int kMostWords = 5;   // words of a row in a step
constexpr int kMostPieces = 80;

// Bits of word `from` of a step that lie `left` lower (or -left higher) than where they belong in the word made.
struct Piece {
  int32_t from, left;
  uint32_t mask;  // where they belong
};

// How the words of a step are made: pieces [first[w], first[w + 1]) for word w, the first of them of left >= 0 up to right[w].
struct StepPlan {
  int words;
  int first[kMostWords + 1], right[kMostWords];
  uint32_t flip[kMostWords];  // what the words of the codes are xored with before
  Piece pieces[kMostPieces];
};

struct GemmPackTable {
  // Up to kPackSteps steps of 32 rows, `stride` bytes apart, of which kPackSteps * words words can be read each, to dst
  // [steps * words][32].
  void (*steps)(const uint8_t* src, int64_t stride, int64_t steps, const StepPlan& plan, uint32_t* dst);
};

namespace portable { extern const GemmPackTable gemm_pack; }
BITLINE_AVX2(namespace avx2 { extern const GemmPackTable gemm_pack; })
BITLINE_AVX512(namespace avx512 { extern const GemmPackTable gemm_pack; })

}  // namespace bitline

// The words of 32 rows are transposed, so that a vector is one word of many rows; then all rows' bits move alike.
#include "gemm_pack.h"

#include "variants/transpose.h"

namespace bitline::BITLINE_LEVEL {
namespace {

constexpr int kVectors = kPackRows / kBlock;  // vectors of one word of all rows

#if defined(BITLINE_LEVEL_avx512)
inline Words flipped(Words x, uint32_t by) { return _mm512_xor_si512(x, _mm512_set1_epi32(int(by))); }
inline Words left(Words sum, Words x, int by, uint32_t mask) {
  return _mm512_ternarylogic_epi32(sum, _mm512_sll_epi32(x, _mm_cvtsi32_si128(by)), _mm512_set1_epi32(int(mask)), 0xF8);
}
inline Words right(Words sum, Words x, int by, uint32_t mask) {
  return _mm512_ternarylogic_epi32(sum, _mm512_srl_epi32(x, _mm_cvtsi32_si128(by)), _mm512_set1_epi32(int(mask)), 0xF8);
}
#elif defined(BITLINE_LEVEL_avx2)
inline Words flipped(Words x, uint32_t by) { return _mm256_xor_si256(x, _mm256_set1_epi32(int(by))); }
inline Words left(Words sum, Words x, int by, uint32_t mask) {
  return _mm256_or_si256(sum, _mm256_and_si256(_mm256_sll_epi32(x, _mm_cvtsi32_si128(by)), _mm256_set1_epi32(int(mask))));
}
inline Words right(Words sum, Words x, int by, uint32_t mask) {
  return _mm256_or_si256(sum, _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(by)), _mm256_set1_epi32(int(mask))));
}
#else
inline Words flipped(Words x, uint32_t by) {
  for (int i = 0; i < kBlock; ++i) x.at[i] ^= by;
  return x;
}
inline Words left(Words sum, Words x, int by, uint32_t mask) {
  for (int i = 0; i < kBlock; ++i) sum.at[i] |= (x.at[i] << by) & mask;
  return sum;
}
inline Words right(Words sum, Words x, int by, uint32_t mask) {
  for (int i = 0; i < kBlock; ++i) sum.at[i] |= (x.at[i] >> by) & mask;
  return sum;
}
#endif

void steps(const uint8_t* src, int64_t stride, int64_t count, const StepPlan& plan, uint32_t* dst) {
  alignas(64) uint32_t turned[kPackSteps * kMostWords][kPackRows];
  const int words = plan.words, all = kPackSteps * words;
  const bool past = aligned(dst);
  for (int r = 0; r < kPackRows; r += kBlock) {
    for (int w = 0; w < all; w += kBlock) {
      Words x[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        const uint8_t* from = src + (r + i) * stride + w * 4;
        x[i] = load(reinterpret_cast<const uint32_t*>(from));
        __builtin_prefetch(from + 2 * all * 4, 0, 2);  // rows lie too far apart for a prefetcher to follow
      }
      transpose_block(x);
      for (int i = 0; i < kBlock; ++i) store(turned[w + i] + r, flipped(x[i], plan.flip[(w + i) % words]));
    }
  }
  for (int64_t s = 0; s < count; ++s) {
    for (int w = 0; w < words; ++w) {
      Words sum[kVectors] = {};
      int p = plan.first[w];
      for (; p < plan.right[w]; ++p) {
        const Piece& piece = plan.pieces[p];
        for (int v = 0; v < kVectors; ++v)
          sum[v] = left(sum[v], load(turned[s * words + piece.from] + v * kBlock), piece.left, piece.mask);
      }
      for (; p < plan.first[w + 1]; ++p) {
        const Piece& piece = plan.pieces[p];
        for (int v = 0; v < kVectors; ++v)
          sum[v] = right(sum[v], load(turned[s * words + piece.from] + v * kBlock), -piece.left, piece.mask);
      }
      for (int v = 0; v < kVectors; ++v) store(dst + (s * words + w) * kPackRows + v * kBlock, sum[v], past);
    }
  }
  finish_past();
}

}  // namespace

extern const GemmPackTable gemm_pack = {steps};

}  // namespace bitline::BITLINE_LEVEL

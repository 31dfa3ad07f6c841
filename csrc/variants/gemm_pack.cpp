// The int32 of 32 rows are transposed, so that a vector holds the same int32 of many rows; bits then move alike in all of them.
#include "gemm_pack.h"

#include "variants/transpose.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kVectors = kBlockN / kLanes;  // vectors of one int32 of all rows

// shift_left, shift_right: out | (x shifted & mask).
#if defined(BITLINE_ISA_avx512)
inline Vec flip_bits(Vec x, uint32_t flip) { return _mm512_xor_si512(x, _mm512_set1_epi32(int(flip))); }
inline Vec shift_left(Vec out, Vec x, int by, uint32_t mask) {
  return _mm512_ternarylogic_epi32(out, _mm512_sll_epi32(x, _mm_cvtsi32_si128(by)), _mm512_set1_epi32(int(mask)), 0xF8);
}
inline Vec shift_right(Vec out, Vec x, int by, uint32_t mask) {
  return _mm512_ternarylogic_epi32(out, _mm512_srl_epi32(x, _mm_cvtsi32_si128(by)), _mm512_set1_epi32(int(mask)), 0xF8);
}
#elif defined(BITLINE_ISA_avx2)
inline Vec flip_bits(Vec x, uint32_t flip) { return _mm256_xor_si256(x, _mm256_set1_epi32(int(flip))); }
inline Vec shift_left(Vec out, Vec x, int by, uint32_t mask) {
  return _mm256_or_si256(out, _mm256_and_si256(_mm256_sll_epi32(x, _mm_cvtsi32_si128(by)), _mm256_set1_epi32(int(mask))));
}
inline Vec shift_right(Vec out, Vec x, int by, uint32_t mask) {
  return _mm256_or_si256(out, _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(by)), _mm256_set1_epi32(int(mask))));
}
#else
inline Vec flip_bits(Vec x, uint32_t flip) {
  for (int i = 0; i < kLanes; ++i) x.lane[i] ^= flip;
  return x;
}
inline Vec shift_left(Vec out, Vec x, int by, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i) out.lane[i] |= (x.lane[i] << by) & mask;
  return out;
}
inline Vec shift_right(Vec out, Vec x, int by, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i) out.lane[i] |= (x.lane[i] >> by) & mask;
  return out;
}
#endif

void pack_k_blocks(const uint8_t* src, int64_t stride, int64_t k_blocks, const KBlockPlan& plan, uint32_t* dst) {
  alignas(64) uint32_t transposed[kPackKBlocks * kMaxInt32][kBlockN];
  const int per_k_block = plan.int32_count, all = kPackKBlocks * per_k_block;
  const bool non_temporal = aligned(dst);
  for (int r = 0; r < kBlockN; r += kLanes) {
    for (int w = 0; w < all; w += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const uint8_t* from = src + (r + i) * stride + w * 4;
        x[i] = load(reinterpret_cast<const uint32_t*>(from));
        __builtin_prefetch(from + 2 * all * 4, 0, 2);  // rows lie too far apart for hardware prefetchers
      }
      transpose_tile(x);
      for (int i = 0; i < kLanes; ++i) store(transposed[w + i] + r, flip_bits(x[i], plan.flip[(w + i) % per_k_block]));
    }
  }
  for (int64_t kb = 0; kb < k_blocks; ++kb) {
    for (int i = 0; i < per_k_block; ++i) {
      Vec out[kVectors] = {};
      int m = plan.first_move[i];
      for (; m < plan.first_right[i]; ++m) {
        const BitMove& move = plan.moves[m];
        for (int v = 0; v < kVectors; ++v)
          out[v] = shift_left(out[v], load(transposed[kb * per_k_block + move.source] + v * kLanes), move.shift, move.mask);
      }
      for (; m < plan.first_move[i + 1]; ++m) {
        const BitMove& move = plan.moves[m];
        for (int v = 0; v < kVectors; ++v)
          out[v] = shift_right(out[v], load(transposed[kb * per_k_block + move.source] + v * kLanes), -move.shift, move.mask);
      }
      for (int v = 0; v < kVectors; ++v) store(dst + (kb * per_k_block + i) * kBlockN + v * kLanes, out[v], non_temporal);
    }
  }
  stream_fence();
}

}  // namespace

extern const GemmPackKernels gemm_pack_kernels = {pack_k_blocks};

}  // namespace bitline::BITLINE_ISA

// What GEMMs over dequantized panels share: K slices of an N block dequantized into cache, and the epilogue of 32 columns of y.
#pragma once

#include "gemm_avx512_dequant.h"

namespace bitline::BITLINE_ISA {
namespace {

// Prefetch distances in bytes. Codes are prefetched shortly before use, their pages long before: a page walk whose page table
// entry has left the caches takes longer than 4 KB of codes (W4A16, M=1 between calls of other layers: 190 us with
// kPageDistance, 247 without).
constexpr int64_t kCodeDistance = 4096, kPageDistance[] = {32768, 65536}, kPageBytes = 4096, kScaleDistance = 1024;

INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Scales and offsets of some groups of an N block as float32, [groups][32].
INLINE void load_group_scales(const GemmCall& c, int64_t block, int64_t first_group, int64_t groups, float (*scales)[kBlockN],
                              float (*offsets)[kBlockN]) {
  ScaleCursor cursor(*c.w, c.base, block, first_group);
  for (int64_t g = 0; g < groups; g++, cursor.next()) cursor.store(scales[g], offsets[g]);
}

// scale * w + offset, rounded once to bfloat16, as a dense bfloat16 layer would hold it: no scale is left for the accumulators.
INLINE __m512i scale_pair(__m512i pair, __m512 scale, __m512 offset) {
  const __m512 a = _mm512_fmadd_ps(low_f32(pair), scale, offset), b = _mm512_fmadd_ps(high_f32(pair), scale, offset);
  const __m512i order = _mm512_or_si512(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                         _mm512_set1_epi32(16)), 16),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

// Codes of k_blocks K blocks to a panel [operand][32]. next: codes to prefetch meanwhile, as many.
template <class Compute, int BITS>
void dequantize(const GemmCall& c, const uint8_t* p, int64_t k_blocks, uint32_t* panel, const uint8_t* next = nullptr) {
  using Codes = KBlock<BITS>;
  const typename Compute::template LutOf<BITS> lut(c);
  for (int64_t kb = 0; kb < k_blocks; kb++) {
    Codes codes0, codes1;
    codes0.read(p), codes1.read(p + 64);
    UNROLL for (int j = 0; j < Codes::columns / Compute::k_per_operand; j++) {
      _mm512_store_si512(panel, Compute::template operand<BITS>(codes0, lut, j));
      _mm512_store_si512(panel + 16, Compute::template operand<BITS>(codes1, lut, j));
      panel += 32;
    }
    p += 128 * Codes::vectors;
    if (next == nullptr) continue;
    UNROLL for (int i = 0; i < 2 * Codes::vectors; i++) prefetch(next + 64 * i);
    next += 128 * Codes::vectors;
  }
}

// The same of one group, with its scales [32] and offsets [32] (or null) applied.
template <int BITS>
void dequantize_scaled(const GemmCall& c, const uint8_t* p, int64_t k_blocks, const float* scales, const float* offsets,
                       uint32_t* panel, const uint8_t* next = nullptr) {
  using Codes = KBlock<BITS>;
  const Lut<BITS> lut(c);
  const __m512 s0 = _mm512_loadu_ps(scales), s1 = _mm512_loadu_ps(scales + 16), zero = _mm512_setzero_ps();
  const __m512 o0 = offsets ? _mm512_loadu_ps(offsets) : zero, o1 = offsets ? _mm512_loadu_ps(offsets + 16) : zero;
  for (int64_t kb = 0; kb < k_blocks; kb++) {
    Codes codes0, codes1;
    codes0.read(p), codes1.read(p + 64);
    UNROLL for (int j = 0; j < Codes::columns / 2; j++) {
      _mm512_store_si512(panel, scale_pair(codes0.bf16_pair(lut, j), s0, o0));
      _mm512_store_si512(panel + 16, scale_pair(codes1.bf16_pair(lut, j), s1, o1));
      panel += 32;
    }
    p += 128 * Codes::vectors;
    if (next == nullptr) continue;
    UNROLL for (int i = 0; i < 2 * Codes::vectors; i++) prefetch(next + 64 * i);
    next += 128 * Codes::vectors;
  }
}

// Bias, rounding and store of 16 columns of a row of y; columns past N are masked.
INLINE void store_y16(const GemmCall& c, int64_t row, int64_t col, __m512 v) {
  const int64_t left = c.w->n - col;
  if (left <= 0) return;
  const __mmask16 mask = left >= 16 ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
  if (c.dtype == kFloat32) {
    if (c.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, static_cast<const float*>(c.bias) + col));
    _mm512_mask_storeu_ps(static_cast<float*>(c.y) + row * c.w->n + col, mask, v);
    return;
  }
  const int64_t at = row * c.w->n + col;
  __m256i b = _mm256_setzero_si256();
  if (c.bias) b = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(c.bias) + col);
  uint16_t* y = static_cast<uint16_t*>(c.y) + at;
  if (c.dtype == kFloat16) {
    if (c.bias) v = _mm512_add_ps(v, _mm512_cvtph_ps(b));
    _mm256_mask_storeu_epi16(y, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  } else {
    if (c.bias) v = _mm512_add_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
    _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(v));
  }
}

// 32 columns of a row of y: activation scale, bias, rounding, store.
INLINE void epilogue(const GemmCall& c, int64_t row, int64_t block, __m512 a, __m512 b) {
  if (c.act_scale) {
    const __m512 s = _mm512_set1_ps(c.act_scale[row]);
    a = _mm512_mul_ps(a, s), b = _mm512_mul_ps(b, s);
  }
  store_y16(c, row, block * kBlockN, a);
  store_y16(c, row, block * kBlockN + 16, b);
}

}  // namespace
}  // namespace bitline::BITLINE_ISA

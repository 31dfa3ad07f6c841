// Vectors of kLanes 32-bit lanes for the levels below AVX-512: what the kernels need beyond the compiler's vector arithmetic.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#include "variants/transpose.h"  // kLanes

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

namespace bitline::BITLINE_ISA {
namespace {

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef int16_t I16 __attribute__((vector_size(4 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(4 * kLanes)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));  // 16 bits of each lane

template <class V> INLINE V load_as(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE F32 load_f32(const float* p) { return load_as<F32>(p); }
INLINE U32 load_u32(const void* p) { return load_as<U32>(p); }
INLINE U8x16 load_u8x16(const void* p) { return load_as<U8x16>(p); }
INLINE void store_f32(float* p, F32 v) { memcpy(p, &v, sizeof v); }
INLINE F32 splat(float v) { return v - F32{}; }  // a sum with zero would be computed: it changes the sign of -0
INLINE I32 splat(int32_t v) { return I32{} + v; }
INLINE U32 splat(uint32_t v) { return U32{} + v; }
INLINE F32 to_f32(I32 v) { return __builtin_convertvector(v, F32); }
INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#ifndef __aarch64__

constexpr int kVectorRegisters = 16;
INLINE F32 fma(F32 a, F32 b, F32 c) { return F32(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
INLINE __m128i load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE __m128i load_8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
INLINE F32 load_bf16(const void* p) { return F32(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(p)), 16)); }
INLINE F32 load_f16(const void* p) { return F32(_mm256_cvtph_ps(load_16(p))); }
INLINE I32 load_u8(const void* p) { return I32(_mm256_cvtepu8_epi32(load_8(p))); }
INLINE I32 load_i8(const void* p) { return I32(_mm256_cvtepi8_epi32(load_8(p))); }
INLINE float f16_to_f32(uint16_t v) { return _cvtsh_ss(v); }
INLINE uint16_t f32_to_f16(float v) { return _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
INLINE Halves f32_to_f16(F32 v) { return Halves(_mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT)); }
INLINE Halves high_halves(U32 v) {
  const __m256i high = _mm256_srli_epi32(__m256i(v), 16);
  return Halves(_mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
INLINE int32_t max_lane(I32 v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(__m256i(v)), _mm256_extracti128_si256(__m256i(v), 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}

// Each byte of v from a table of 16; v: less than 16.
INLINE U32 look_up(U8x16 table, U32 v) {
  return U32(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(__m128i(table)), __m256i(v)));
}
// 16 float32 by code.
struct Table16 {
  F32 low, high;
};
INLINE Table16 load_table16(const float* p) { return {load_f32(p), load_f32(p + 8)}; }
INLINE F32 look_up(const Table16& t, U32 code) {
  const __m256 low = _mm256_permutevar8x32_ps(__m256(t.low), __m256i(code));
  const __m256 high = _mm256_permutevar8x32_ps(__m256(t.high), __m256i(code));
  return F32(_mm256_blendv_ps(low, high, __m256(code << 28)));
}
INLINE F32 gather(const float* table, U32 code) { return F32(_mm256_i32gather_ps(table, __m256i(code), 4)); }

// Unsigned bytes times signed bytes. dot4 adds four products to a 32-bit lane (VNNI). dot2: sums of two, saturated to 16 bits;
// widen_add adds pairs of those to 32-bit lanes.
#ifdef BITLINE_ISA_avx_vnni
// Inline assembly: around the intrinsic GCC 12 copies each accumulator.
INLINE I32 dot4(I32 acc, U32 codes, U32 digits) {
#ifdef BITLINE_EMULATED
  for (int i = 0; i < 32; ++i) acc[i / 4] += int32_t(uint8_t(codes[i / 4] >> 8 * (i % 4))) * int8_t(digits[i / 4] >> 8 * (i % 4));
  return acc;
#else
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(codes), "x"(digits));
  return acc;
#endif
}
#else
INLINE I32 dot4(I32 acc, U32, U32) { return acc; }
#endif
INLINE I16 dot2(U32 codes, U32 digits) { return I16(_mm256_maddubs_epi16(__m256i(codes), __m256i(digits))); }
INLINE I32 widen_add(I32 acc, I16 v) { return acc + I32(_mm256_madd_epi16(__m256i(v), _mm256_set1_epi16(1))); }

#else  // NEON

constexpr int kVectorRegisters = 32;
INLINE F32 fma(F32 a, F32 b, F32 c) { return F32(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b))); }
INLINE F32 load_bf16(const void* p) { return F32(vshll_n_u16(vcreate_u16(load_as<uint64_t>(p)), 16)); }
INLINE F32 load_f16(const void* p) { return F32(vcvt_f32_f16(vreinterpret_f16_u16(vcreate_u16(load_as<uint64_t>(p))))); }
INLINE I32 load_u8(const void* p) { return I32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(load_as<uint32_t>(p)))))); }
INLINE I32 load_i8(const void* p) { return I32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(load_as<uint32_t>(p)))))); }
INLINE float f16_to_f32(uint16_t v) { return load_as<__fp16>(&v); }
INLINE uint16_t f32_to_f16(float v) {
  const __fp16 half = __fp16(v);
  return load_as<uint16_t>(&half);
}
INLINE Halves f32_to_f16(F32 v) { return Halves(vcvt_f16_f32(float32x4_t(v))); }
INLINE Halves high_halves(U32 v) { return Halves(vshrn_n_u32(uint32x4_t(v), 16)); }
INLINE int32_t max_lane(I32 v) { return vmaxvq_s32(int32x4_t(v)); }

// Each byte of v from a table of 16; v: less than 16.
INLINE U32 look_up(U8x16 table, U32 v) { return U32(vqtbl1q_u8(uint8x16_t(table), uint8x16_t(v))); }
// 16 float32 by code.
struct Table16 {
  uint8x16x4_t bytes;
};
INLINE Table16 load_table16(const float* p) { return {vld1q_u8_x4(reinterpret_cast<const uint8_t*>(p))}; }
INLINE F32 look_up(const Table16& t, U32 code) {
  return F32(vqtbl4q_u8(t.bytes, uint8x16_t(code * 0x04040404u + 0x03020100u)));
}
INLINE F32 gather(const float* table, U32 code) { return F32{table[code[0]], table[code[1]], table[code[2]], table[code[3]]}; }

// Four products of a byte of codes and a signed one are added to a 32-bit lane. Codes are unsigned with i8mm; without it signed,
// see code_bias().
INLINE I32 dot4(I32 acc, U32 codes, U32 digits) {
#ifdef BITLINE_ISA_neon_i8mm
  return I32(vusdotq_s32(int32x4_t(acc), uint8x16_t(codes), int8x16_t(digits)));
#else
  return I32(vdotq_s32(int32x4_t(acc), int8x16_t(codes), int8x16_t(digits)));
#endif
}
INLINE I16 dot2(U32, U32) { return I16{}; }  // where dot4 is not there
INLINE I32 widen_add(I32 acc, I16) { return acc; }

#endif

}  // namespace
}  // namespace bitline::BITLINE_ISA

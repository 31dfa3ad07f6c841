// kLanes x kLanes tiles of int32, transposed in registers: the building block of every repacking and of activation packing.
#pragma once

#include <stdint.h>

#if defined(BITLINE_ISA_avx2) || defined(BITLINE_ISA_avx_vnni) || defined(BITLINE_ISA_avx512)
#include <immintrin.h>
#elif defined(BITLINE_ISA_neon) || defined(BITLINE_ISA_neon_i8mm)
#include <arm_neon.h>
#endif

namespace bitline::BITLINE_ISA {
namespace {

#if defined(BITLINE_ISA_avx512)

constexpr int kLanes = 16;
using Vec = __m512i;

inline Vec load(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline void store(uint32_t* p, Vec x) { _mm512_storeu_si512(p, x); }
inline void stream_store(uint32_t* p, Vec x) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x); }
inline void stream_fence() { _mm_sfence(); }

// Lane j of x[i] becomes lane i of x[j]: 32-bit lanes, then 64-bit, then 128-bit lanes are exchanged.
inline void transpose_tile(Vec (&x)[16]) {
  Vec y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // 128-bit lane l of x[4 * g + i] holds column 4 * l + i of rows 4 * g …
    const Vec a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
    const Vec c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88), d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    y[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    y[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
    y[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

#elif defined(BITLINE_ISA_avx2) || defined(BITLINE_ISA_avx_vnni)

constexpr int kLanes = 8;
using Vec = __m256i;

inline Vec load(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store(uint32_t* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline void stream_store(uint32_t* p, Vec x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
inline void stream_fence() { _mm_sfence(); }

inline void transpose_tile(Vec (&x)[8]) {
  Vec y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
    y[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

#elif defined(BITLINE_ISA_neon) || defined(BITLINE_ISA_neon_i8mm)

constexpr int kLanes = 4;
using Vec = uint32x4_t;

inline Vec load(const uint32_t* p) { return vld1q_u32(p); }
inline void store(uint32_t* p, Vec x) { vst1q_u32(p, x); }
inline void stream_store(uint32_t* p, Vec x) { store(p, x); }
inline void stream_fence() {}

inline void transpose_tile(Vec (&x)[4]) {
  const Vec a = vzip1q_u32(x[0], x[2]), b = vzip2q_u32(x[0], x[2]), c = vzip1q_u32(x[1], x[3]), d = vzip2q_u32(x[1], x[3]);
  x[0] = vzip1q_u32(a, c), x[1] = vzip2q_u32(a, c), x[2] = vzip1q_u32(b, d), x[3] = vzip2q_u32(b, d);
}

#else

constexpr int kLanes = 8;
struct Vec {
  uint32_t lane[8];
};

inline Vec load(const uint32_t* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof x);  // p may be unaligned
  return x;
}
inline void store(uint32_t* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
inline void stream_store(uint32_t* p, Vec x) { store(p, x); }
inline void stream_fence() {}
inline void transpose_tile(Vec (&x)[8]) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < i; ++j) {
      const uint32_t lane = x[i].lane[j];
      x[i].lane[j] = x[j].lane[i];
      x[j].lane[i] = lane;
    }
  }
}

#endif

constexpr int64_t kCacheLine = 64;  // bytes

// Whether vectors at p, and at multiples of `stride` int32 from it, are aligned, as non-temporal stores need.
inline bool aligned(const uint32_t* p, int64_t stride = 0) {
  return (reinterpret_cast<uintptr_t>(p) | uintptr_t(stride) * 4) % sizeof(Vec) == 0;
}

// A plain or non-temporal store. A non-temporal one skips the read for ownership of its cache line, half of the traffic where
// whole lines are written and exceed the cache. stream_fence comes before another thread reads them.
inline void store(uint32_t* p, Vec x, bool non_temporal) {
  if (non_temporal) stream_store(p, x);
  else store(p, x);
}

}  // namespace
}  // namespace bitline::BITLINE_ISA

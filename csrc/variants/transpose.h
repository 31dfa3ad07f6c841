// Square blocks of words, transposed in registers: the step that every repacking below ends with.
#pragma once

#include <stdint.h>

#if defined(BITLINE_LEVEL_avx2) || defined(BITLINE_LEVEL_avx512)
#include <immintrin.h>
#endif

namespace bitline::BITLINE_LEVEL {
namespace {

#if defined(BITLINE_LEVEL_avx512)

constexpr int kBlock = 16;
using Words = __m512i;

inline Words load(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline void store(uint32_t* p, Words x) { _mm512_storeu_si512(p, x); }
inline void store_past(uint32_t* p, Words x) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x); }
inline void finish_past() { _mm_sfence(); }

// x[i] lane j becomes x[j] lane i: pairs of words, of double words, then of 128-bit lanes change places.
inline void transpose_block(Words (&x)[16]) {
  Words y[16];
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
  for (int i = 0; i < 4; ++i) {  // 128-bit lane l of x[4 * g + i] is column 4 * l + i of rows 4 * g …
    const Words a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
    const Words c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88), d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    y[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    y[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
    y[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

#elif defined(BITLINE_LEVEL_avx2)

constexpr int kBlock = 8;
using Words = __m256i;

inline Words load(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store(uint32_t* p, Words x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline void store_past(uint32_t* p, Words x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
inline void finish_past() { _mm_sfence(); }

inline void transpose_block(Words (&x)[8]) {
  Words y[8];
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

#else

constexpr int kBlock = 8;
struct Words {
  uint32_t at[8];
};

inline Words load(const uint32_t* p) {
  Words x;
  __builtin_memcpy(&x, p, sizeof x);  // p need not be aligned
  return x;
}
inline void store(uint32_t* p, Words x) { __builtin_memcpy(p, &x, sizeof x); }
inline void store_past(uint32_t* p, Words x) { store(p, x); }
inline void finish_past() {}
inline void transpose_block(Words (&x)[8]) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < i; ++j) {
      const uint32_t word = x[i].at[j];
      x[i].at[j] = x[j].at[i];
      x[j].at[i] = word;
    }
  }
}

#endif

constexpr int64_t kLine = 64;  // bytes of a cache line

// Whether vectors at p, and `step` words further on, may be stored past the caches: they are aligned to vectors.
inline bool aligned(const uint32_t* p, int64_t step = 0) {
  return (reinterpret_cast<uintptr_t>(p) | uintptr_t(step) * 4) % sizeof(Words) == 0;
}

// store, or store_past: that saves reading every line before it is overwritten, which is half of the time, where lines are written
// as a whole and too many for a cache. finish_past comes before another thread reads them.
inline void store(uint32_t* p, Words x, bool past) {
  if (past) store_past(p, x);
  else store(p, x);
}

}  // namespace
}  // namespace bitline::BITLINE_LEVEL

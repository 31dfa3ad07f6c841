#include "int4pack.h"

#ifdef BITLINE_ISA_avx2
#include <immintrin.h>
#endif

namespace bitline::BITLINE_ISA {
namespace {

constexpr int64_t kRowBytes = kChunkCodes / 2;  // of a row of nibbles

#ifdef BITLINE_ISA_avx2

// A 16 x 16 transpose of bytes; rows lie `step` rows of nibbles apart.
inline void load_transposed16(const uint8_t* rows, int step, __m128i (&x)[16]) {
  __m128i y[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * step * kRowBytes));
  for (int i = 0; i < 8; ++i) y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]), y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
  for (int i = 0; i < 8; ++i) x[2 * i] = _mm_unpacklo_epi8(y[i], y[i + 8]), x[2 * i + 1] = _mm_unpackhi_epi8(y[i], y[i + 8]);
  for (int i = 0; i < 8; ++i) y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]), y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
  for (int i = 0; i < 8; ++i) x[2 * i] = _mm_unpacklo_epi8(y[i], y[i + 8]), x[2 * i + 1] = _mm_unpackhi_epi8(y[i], y[i + 8]);
}

void interleave(const uint8_t* rows, int64_t codes, const NibbleOrder& order, uint8_t* dst) {
  const int64_t half = order.rows / 2;
  const __m128i low_bits = _mm_set1_epi8(0x0F), high_bits = _mm_set1_epi8(char(0xF0));
  for (int64_t at = 0; at < codes; at += 32) {
    for (int64_t r = 0; r < half; r += 16) {
      __m128i low[16], high[16];
      load_transposed16(rows + (order.low_start + r * order.low_step) * kRowBytes + at / 2, order.low_step, low);
      load_transposed16(rows + (order.high_start + r * order.high_step) * kRowBytes + at / 2, order.high_step, high);
      for (int i = 0; i < 16; ++i) {
        const __m128i even = _mm_or_si128(_mm_and_si128(low[i], low_bits), _mm_and_si128(_mm_slli_epi16(high[i], 4), high_bits));
        const __m128i odd = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(low[i], 4), low_bits), _mm_and_si128(high[i], high_bits));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + (at + 2 * i) * half + r), even);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + (at + 2 * i + 1) * half + r), odd);
      }
    }
  }
}

inline __m256i look_up(const uint8_t* lut, __m256i codes) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lut)));
  return _mm256_shuffle_epi8(table, codes);
}

void map_codes(uint8_t* codes, int64_t n, uint8_t flip, uint8_t add, const uint8_t* lut) {
  const __m256i x = _mm256_set1_epi8(char(flip)), a = _mm256_set1_epi8(char(add));
  for (int64_t i = 0; i < n; i += 32) {  // whole vectors fit: kChunkCodes is a multiple of 32
    __m256i* at = reinterpret_cast<__m256i*>(codes + i);
    const __m256i c = _mm256_loadu_si256(at);
    _mm256_storeu_si256(at, lut ? look_up(lut, c) : _mm256_add_epi8(_mm256_xor_si256(c, x), a));
  }
}

#else

void interleave(const uint8_t* rows, int64_t codes, const NibbleOrder& order, uint8_t* dst) {
  const int64_t half = order.rows / 2;
  for (int64_t k = 0; k < codes; ++k) {
    for (int64_t j = 0; j < half; ++j) {
      const uint8_t low = rows[(order.low_start + j * order.low_step) * kRowBytes + k / 2] >> (k % 2 * 4) & 15;
      const uint8_t high = rows[(order.high_start + j * order.high_step) * kRowBytes + k / 2] >> (k % 2 * 4) & 15;
      dst[k * half + j] = uint8_t(low | high << 4);
    }
  }
}

void map_codes(uint8_t* codes, int64_t n, uint8_t flip, uint8_t add, const uint8_t* lut) {
  for (int64_t i = 0; i < n; ++i) codes[i] = lut ? lut[codes[i] & 15] : uint8_t((codes[i] ^ flip) + add);
}

#endif

void pack_nibbles(const uint8_t* codes, int64_t n, int shift, uint8_t* dst) {
  for (int64_t i = 0; i < n / 2; ++i) dst[i] = uint8_t((codes[2 * i] >> shift & 15) | (codes[2 * i + 1] >> shift & 15) << 4);
}

// float32 to bfloat16 bits, round to nearest even.
inline uint32_t to_bf16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

inline float from_bf16(uint32_t bits) { return __builtin_bit_cast(float, bits << 16); }

// addend(group, s): the z of a pair.
template <class Addend>
void fill_pairs(const ScaleConversion& c, const float* scale, uint32_t* pairs, uint32_t* high_pairs, const Addend& addend) {
  for (int64_t j = 0; j < c.columns; ++j) {
    const int64_t g = c.group[j];
    const uint32_t s = to_bf16(scale[g] * c.step);
    pairs[j] = s | to_bf16(addend(g, from_bf16(s))) << 16;
  }
  if (high_pairs == nullptr) return;
  for (int64_t j = 0; j < c.columns; ++j) {
    const float s = from_bf16(pairs[j] & 0xFFFF);
    high_pairs[j] = to_bf16(16 * s) | to_bf16(8 * s) << 16;
  }
}

void scale_pairs(const ScaleConversion& c, const float* scale, const uint8_t* zero, const float* offset, uint32_t* pairs,
                 uint32_t* high_pairs) {
  if (offset != nullptr)
    fill_pairs(c, scale, pairs, high_pairs, [&](int64_t g, float) { return scale[g] * c.step_center + offset[g]; });
  else if (zero != nullptr)
    fill_pairs(c, scale, pairs, high_pairs, [&](int64_t g, float s) { return s * (c.center - float(zero[g])); });
  else
    fill_pairs(c, scale, pairs, high_pairs, [&](int64_t, float s) { return s * c.center; });
}

}  // namespace

extern const Int4PackKernels int4pack_kernels = {interleave, map_codes, pack_nibbles, scale_pairs};

}  // namespace bitline::BITLINE_ISA

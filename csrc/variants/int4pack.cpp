#include "int4pack.h"

#ifdef BITLINE_LEVEL_avx2
#include <immintrin.h>
#endif

namespace bitline::BITLINE_LEVEL {
namespace {

constexpr int64_t kRow = kChunk / 2;  // bytes of a row of nibbles

#ifdef BITLINE_LEVEL_avx2

// Byte j of row i becomes byte i of row j, rows of 16 bytes.
inline void transpose16(const uint8_t* rows, int step, __m128i (&x)[16]) {
  __m128i y[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * step * kRow));
  for (int i = 0; i < 8; ++i) y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]), y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
  for (int i = 0; i < 8; ++i) x[2 * i] = _mm_unpacklo_epi8(y[i], y[i + 8]), x[2 * i + 1] = _mm_unpackhi_epi8(y[i], y[i + 8]);
  for (int i = 0; i < 8; ++i) y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]), y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
  for (int i = 0; i < 8; ++i) x[2 * i] = _mm_unpacklo_epi8(y[i], y[i + 8]), x[2 * i + 1] = _mm_unpackhi_epi8(y[i], y[i + 8]);
}

void lay(const uint8_t* rows, int64_t codes, const NibbleLayout& layout, uint8_t* dst) {
  const int64_t half = layout.block / 2;
  const __m128i low_bits = _mm_set1_epi8(0x0F), high_bits = _mm_set1_epi8(char(0xF0));
  for (int64_t at = 0; at < codes; at += 32) {
    for (int64_t r = 0; r < half; r += 16) {
      __m128i low[16], high[16];
      transpose16(rows + (layout.low_start + r * layout.low_step) * kRow + at / 2, layout.low_step, low);
      transpose16(rows + (layout.high_start + r * layout.high_step) * kRow + at / 2, layout.high_step, high);
      for (int i = 0; i < 16; ++i) {
        const __m128i even = _mm_or_si128(_mm_and_si128(low[i], low_bits), _mm_and_si128(_mm_slli_epi16(high[i], 4), high_bits));
        const __m128i odd = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(low[i], 4), low_bits), _mm_and_si128(high[i], high_bits));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + (at + 2 * i) * half + r), even);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + (at + 2 * i + 1) * half + r), odd);
      }
    }
  }
}

inline __m256i looked_up(const uint8_t* table, __m256i codes) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return _mm256_shuffle_epi8(both, codes);
}

void change(uint8_t* codes, int64_t n, uint8_t flip, uint8_t add, const uint8_t* table) {
  const __m256i x = _mm256_set1_epi8(char(flip)), a = _mm256_set1_epi8(char(add));
  for (int64_t i = 0; i < n; i += 32) {  // codes has room for whole vectors: kChunk is a multiple of 32
    __m256i* at = reinterpret_cast<__m256i*>(codes + i);
    const __m256i c = _mm256_loadu_si256(at);
    _mm256_storeu_si256(at, table ? looked_up(table, c) : _mm256_add_epi8(_mm256_xor_si256(c, x), a));
  }
}

#else

void lay(const uint8_t* rows, int64_t codes, const NibbleLayout& layout, uint8_t* dst) {
  const int64_t half = layout.block / 2;
  for (int64_t k = 0; k < codes; ++k) {
    for (int64_t j = 0; j < half; ++j) {
      const uint8_t low = rows[(layout.low_start + j * layout.low_step) * kRow + k / 2] >> (k % 2 * 4) & 15;
      const uint8_t high = rows[(layout.high_start + j * layout.high_step) * kRow + k / 2] >> (k % 2 * 4) & 15;
      dst[k * half + j] = uint8_t(low | high << 4);
    }
  }
}

void change(uint8_t* codes, int64_t n, uint8_t flip, uint8_t add, const uint8_t* table) {
  for (int64_t i = 0; i < n; ++i) codes[i] = table ? table[codes[i] & 15] : uint8_t((codes[i] ^ flip) + add);
}

#endif

void nibbles(const uint8_t* codes, int64_t n, int shift, uint8_t* dst) {
  for (int64_t i = 0; i < n / 2; ++i) dst[i] = uint8_t((codes[2 * i] >> shift & 15) | (codes[2 * i + 1] >> shift & 15) << 4);
}

// To bfloat16, to nearest and even, in the low half.
inline uint32_t rounded(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

inline float widened(uint32_t half) { return __builtin_bit_cast(float, half << 16); }

template <class Added>
void fill(const ScaleRow& row, const float* scale, uint32_t* pairs, uint32_t* high, const Added& added) {
  for (int64_t j = 0; j < row.columns; ++j) {
    const int64_t g = row.pick[j];
    const uint32_t s = rounded(scale[g] * row.step);
    pairs[j] = s | rounded(added(g, widened(s))) << 16;
  }
  if (high == nullptr) return;
  for (int64_t j = 0; j < row.columns; ++j) {
    const float s = widened(pairs[j] & 0xFFFF);
    high[j] = rounded(16 * s) | rounded(8 * s) << 16;
  }
}

void scales(const ScaleRow& row, const float* scale, const uint8_t* zero, const float* offset, uint32_t* pairs, uint32_t* high) {
  if (offset != nullptr)
    fill(row, scale, pairs, high, [&](int64_t g, float) { return scale[g] * row.middle + offset[g]; });
  else if (zero != nullptr)
    fill(row, scale, pairs, high, [&](int64_t g, float s) { return s * (row.center - float(zero[g])); });
  else
    fill(row, scale, pairs, high, [&](int64_t, float s) { return s * row.center; });
}

}  // namespace

extern const Int4PackTable int4pack = {lay, change, nibbles, scales};

}  // namespace bitline::BITLINE_LEVEL

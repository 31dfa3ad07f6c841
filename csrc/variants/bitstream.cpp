// Eight codes fill exactly `width` bytes, so eight of them are one step of every width.
#include "bitstream.h"

#include <string.h>

#if defined(BITLINE_LEVEL_avx2) || defined(BITLINE_LEVEL_avx512)
#include <immintrin.h>
#endif

namespace bitline::BITLINE_LEVEL {
namespace {

// Code i of each byte of the result is bits [i * width, …) of `stream`.
inline uint64_t spread(uint64_t stream, int width) {
  const uint64_t mask = (1u << width) - 1;
  uint64_t codes = 0;
  for (int i = 0; i < 8; ++i) codes |= ((stream >> (i * width)) & mask) << (8 * i);
  return codes;
}

// The other way: pairs, then fours, then all eight move together.
inline uint64_t gather(uint64_t x, int width) {
  const uint64_t one = (1u << width) - 1, two = (1u << 2 * width) - 1, four = (1ull << 4 * width) - 1;
  x = (x & one * 0x0001000100010001u) | ((x >> (8 - width)) & (one << width) * 0x0001000100010001u);
  x = (x & two * 0x0000000100000001u) | ((x >> (16 - 2 * width)) & (two << 2 * width) * 0x0000000100000001u);
  return (x & four) | ((x >> (32 - 4 * width)) & (four << 4 * width));
}

// From code `at` (a multiple of 8) on.
void unpack_rest(const uint8_t* src, int64_t at, int64_t k, int width, uint8_t* dst) {
  src += at / 8 * width;
  for (; at < k; at += 8, src += width) {
    const int count = k - at < 8 ? int(k - at) : 8;
    uint64_t stream = 0;
    memcpy(&stream, src, size_t(row_bytes(count, width)));
    const uint64_t codes = spread(stream, width);
    memcpy(dst + at, &codes, size_t(count));
  }
}

void pack_rest(const uint8_t* src, int64_t at, int64_t k, int width, uint8_t* dst) {
  dst += at / 8 * width;
  for (; at < k; at += 8, dst += width) {
    const int count = k - at < 8 ? int(k - at) : 8;
    uint64_t codes = 0;
    memcpy(&codes, src + at, size_t(count));
    const uint64_t stream = gather(codes, width);
    memcpy(dst, &stream, size_t(row_bytes(count, width)));
  }
}

#if defined(BITLINE_LEVEL_avx512)

// 64 codes from 8 * width bytes: their bytes move to the 8-byte lane of their eight codes, where one instruction takes eight
// bits from any bit on, eight times.
void unpack(const uint8_t* src, int64_t k, int width, uint8_t* dst) {
  alignas(64) uint8_t from[64], start[64];
  for (int i = 0; i < 64; ++i) from[i] = uint8_t(i / 8 * width + i % 8), start[i] = uint8_t(i % 8 * width);
  const __m512i move = _mm512_load_si512(from), shift = _mm512_load_si512(start), mask = _mm512_set1_epi8(char((1 << width) - 1));
  const __mmask64 used = ~0ull >> (64 - 8 * width);
  int64_t at = 0;
  for (; at + 64 <= k; at += 64, src += 8 * width) {
    const __m512i lanes = _mm512_permutexvar_epi8(move, _mm512_maskz_loadu_epi8(used, src));
    _mm512_storeu_si512(dst + at, _mm512_and_si512(_mm512_multishift_epi64_epi8(shift, lanes), mask));
  }
  unpack_rest(src - at / 8 * width, at, k, width, dst);
}

void pack(const uint8_t* src, int64_t k, int width, uint8_t* dst) {
  alignas(64) uint8_t from[64] = {};
  for (int i = 0; i < 8 * width; ++i) from[i] = uint8_t(i / width * 8 + i % width);
  const __m512i move = _mm512_load_si512(from);
  const uint64_t one = (1u << width) - 1, two = (1u << 2 * width) - 1, four = (1ull << 4 * width) - 1;
  const __m512i low1 = _mm512_set1_epi16(short(one)), high1 = _mm512_set1_epi16(short(one << width));
  const __m512i low2 = _mm512_set1_epi32(int(two)), high2 = _mm512_set1_epi32(int(two << 2 * width));
  const __m512i low4 = _mm512_set1_epi64((long long)four), high4 = _mm512_set1_epi64((long long)(four << 4 * width));
  const __m128i by1 = _mm_cvtsi32_si128(8 - width), by2 = _mm_cvtsi32_si128(16 - 2 * width), by4 = _mm_cvtsi32_si128(32 - 4 * width);
  const __mmask64 used = ~0ull >> (64 - 8 * width);
  int64_t at = 0;
  for (; at + 64 <= k; at += 64, dst += 8 * width) {
    __m512i x = _mm512_loadu_si512(src + at);
    x = _mm512_or_si512(_mm512_and_si512(x, low1), _mm512_and_si512(_mm512_srl_epi16(x, by1), high1));
    x = _mm512_or_si512(_mm512_and_si512(x, low2), _mm512_and_si512(_mm512_srl_epi32(x, by2), high2));
    x = _mm512_or_si512(_mm512_and_si512(x, low4), _mm512_and_si512(_mm512_srl_epi64(x, by4), high4));
    _mm512_mask_storeu_epi8(dst, used, _mm512_permutexvar_epi8(move, x));
  }
  pack_rest(src, at, k, width, dst - at / 8 * width);
}

#elif defined(BITLINE_LEVEL_avx2)

inline __m256i both(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

// 16 codes from the 2 * width bytes of each half: the two bytes that a code may lie in are moved to a 16-bit lane, shifted so
// that the code ends up in the high byte's low bits, and taken from there.
void unpack(const uint8_t* src, int64_t k, int width, uint8_t* dst) {
  alignas(32) uint8_t from[2][32];
  alignas(32) uint16_t factor[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 16; ++i) {
      const int bit = (8 * half + i % 8) * width;
      from[half][2 * i] = uint8_t(bit / 8), from[half][2 * i + 1] = uint8_t(bit / 8 + 1);
      factor[half][i] = uint16_t(1 << (8 - bit % 8));
    }
  }
  const __m256i* table = reinterpret_cast<const __m256i*>(from);
  const __m256i* factors = reinterpret_cast<const __m256i*>(factor);
  const __m256i mask = _mm256_set1_epi8(char((1 << width) - 1)), move0 = table[0], move1 = table[1];
  const __m256i times0 = factors[0], times1 = factors[1];
  const int64_t bytes = row_bytes(k, width);
  int64_t at = 0, byte = 0;
  for (; at + 32 <= k && byte + 2 * width + 16 <= bytes; at += 32, byte += 4 * width) {
    const __m256i x = both(src + byte, src + byte + 2 * width);
    const __m256i a = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(x, move0), times0), 8);
    const __m256i b = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(x, move1), times1), 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + at), _mm256_and_si256(_mm256_packus_epi16(a, b), mask));
  }
  unpack_rest(src, at, k, width, dst);
}

void pack(const uint8_t* src, int64_t k, int width, uint8_t* dst) {
  alignas(32) uint8_t from[32];
  for (int i = 0; i < 32; ++i) from[i] = i % 16 < 2 * width ? uint8_t(i % 16 / width * 8 + i % 16 % width) : 0x80;
  const __m256i move = *reinterpret_cast<const __m256i*>(from);
  const uint64_t one = (1u << width) - 1, two = (1u << 2 * width) - 1, four = (1ull << 4 * width) - 1;
  const __m256i low1 = _mm256_set1_epi16(short(one)), high1 = _mm256_set1_epi16(short(one << width));
  const __m256i low2 = _mm256_set1_epi32(int(two)), high2 = _mm256_set1_epi32(int(two << 2 * width));
  const __m256i low4 = _mm256_set1_epi64x((long long)four), high4 = _mm256_set1_epi64x((long long)(four << 4 * width));
  const __m128i by1 = _mm_cvtsi32_si128(8 - width), by2 = _mm_cvtsi32_si128(16 - 2 * width), by4 = _mm_cvtsi32_si128(32 - 4 * width);
  const int64_t bytes = row_bytes(k, width);
  int64_t at = 0, byte = 0;
  for (; at + 32 <= k && byte + 2 * width + 16 <= bytes; at += 32, byte += 4 * width) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at));
    x = _mm256_or_si256(_mm256_and_si256(x, low1), _mm256_and_si256(_mm256_srl_epi16(x, by1), high1));
    x = _mm256_or_si256(_mm256_and_si256(x, low2), _mm256_and_si256(_mm256_srl_epi32(x, by2), high2));
    x = _mm256_or_si256(_mm256_and_si256(x, low4), _mm256_and_si256(_mm256_srl_epi64(x, by4), high4));
    x = _mm256_shuffle_epi8(x, move);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + byte), _mm256_castsi256_si128(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + byte + 2 * width), _mm256_extracti128_si256(x, 1));
  }
  pack_rest(src, at, k, width, dst);
}

#else

void unpack(const uint8_t* src, int64_t k, int width, uint8_t* dst) { unpack_rest(src, 0, k, width, dst); }
void pack(const uint8_t* src, int64_t k, int width, uint8_t* dst) { pack_rest(src, 0, k, width, dst); }

#endif

}  // namespace

extern const BitstreamTable bitstream = {unpack, pack};

}  // namespace bitline::BITLINE_LEVEL

// Eight codes fill exactly `bits` bytes, so 8 codes are the unit of every bit width.
#include "bitstream.h"

#include <string.h>

#if defined(BITLINE_ISA_avx2) || defined(BITLINE_ISA_avx512)
#include <immintrin.h>
#endif

namespace bitline::BITLINE_ISA {
namespace {

// Byte i of the result is bits [i * bits, (i + 1) * bits) of the stream.
inline uint64_t unpack8(uint64_t stream, int bits) {
  const uint64_t mask = (1u << bits) - 1;
  uint64_t codes = 0;
  for (int i = 0; i < 8; ++i) codes |= ((stream >> (i * bits)) & mask) << (8 * i);
  return codes;
}

// The inverse in log steps: pairs of codes are joined, then fours, then all eight.
inline uint64_t pack8(uint64_t x, int bits) {
  const uint64_t one = (1u << bits) - 1, two = (1u << 2 * bits) - 1, four = (1ull << 4 * bits) - 1;
  x = (x & one * 0x0001000100010001u) | ((x >> (8 - bits)) & (one << bits) * 0x0001000100010001u);
  x = (x & two * 0x0000000100000001u) | ((x >> (16 - 2 * bits)) & (two << 2 * bits) * 0x0000000100000001u);
  return (x & four) | ((x >> (32 - 4 * bits)) & (four << 4 * bits));
}

// Codes from i (a multiple of 8) on; src and dst are the beginning of the row.
void unpack_tail(const uint8_t* src, int64_t i, int64_t k, int bits, uint8_t* dst) {
  src += i / 8 * bits;
  for (; i < k; i += 8, src += bits) {
    const int count = k - i < 8 ? int(k - i) : 8;
    uint64_t stream = 0;
    memcpy(&stream, src, size_t(row_bytes(count, bits)));
    const uint64_t codes = unpack8(stream, bits);
    memcpy(dst + i, &codes, size_t(count));
  }
}

void pack_tail(const uint8_t* src, int64_t i, int64_t k, int bits, uint8_t* dst) {
  dst += i / 8 * bits;
  for (; i < k; i += 8, dst += bits) {
    const int count = k - i < 8 ? int(k - i) : 8;
    uint64_t codes = 0;
    memcpy(&codes, src + i, size_t(count));
    const uint64_t stream = pack8(codes, bits);
    memcpy(dst, &stream, size_t(row_bytes(count, bits)));
  }
}

#if defined(BITLINE_ISA_avx512)

// 64 codes from 8 * bits bytes: vpermb moves the bytes of each eight codes to a 64-bit lane, vpmultishiftqb extracts eight bits
// from any bit on, for all eight codes at once.
void unpack(const uint8_t* src, int64_t k, int bits, uint8_t* dst) {
  alignas(64) uint8_t byte_index[64], bit_offset[64];
  for (int i = 0; i < 64; ++i) byte_index[i] = uint8_t(i / 8 * bits + i % 8), bit_offset[i] = uint8_t(i % 8 * bits);
  const __m512i permute = _mm512_load_si512(byte_index), shift = _mm512_load_si512(bit_offset);
  const __m512i mask = _mm512_set1_epi8(char((1 << bits) - 1));
  const __mmask64 loaded = ~0ull >> (64 - 8 * bits);
  int64_t i = 0;
  for (; i + 64 <= k; i += 64, src += 8 * bits) {
    const __m512i lanes = _mm512_permutexvar_epi8(permute, _mm512_maskz_loadu_epi8(loaded, src));
    _mm512_storeu_si512(dst + i, _mm512_and_si512(_mm512_multishift_epi64_epi8(shift, lanes), mask));
  }
  unpack_tail(src - i / 8 * bits, i, k, bits, dst);
}

// pack8 in each 64-bit lane, then vpermb closes the gaps.
void pack(const uint8_t* src, int64_t k, int bits, uint8_t* dst) {
  alignas(64) uint8_t byte_index[64] = {};
  for (int i = 0; i < 8 * bits; ++i) byte_index[i] = uint8_t(i / bits * 8 + i % bits);
  const __m512i permute = _mm512_load_si512(byte_index);
  const uint64_t one = (1u << bits) - 1, two = (1u << 2 * bits) - 1, four = (1ull << 4 * bits) - 1;
  const __m512i low1 = _mm512_set1_epi16(short(one)), high1 = _mm512_set1_epi16(short(one << bits));
  const __m512i low2 = _mm512_set1_epi32(int(two)), high2 = _mm512_set1_epi32(int(two << 2 * bits));
  const __m512i low4 = _mm512_set1_epi64((long long)four), high4 = _mm512_set1_epi64((long long)(four << 4 * bits));
  const __m128i by1 = _mm_cvtsi32_si128(8 - bits), by2 = _mm_cvtsi32_si128(16 - 2 * bits), by4 = _mm_cvtsi32_si128(32 - 4 * bits);
  const __mmask64 stored = ~0ull >> (64 - 8 * bits);
  int64_t i = 0;
  for (; i + 64 <= k; i += 64, dst += 8 * bits) {
    __m512i x = _mm512_loadu_si512(src + i);
    x = _mm512_or_si512(_mm512_and_si512(x, low1), _mm512_and_si512(_mm512_srl_epi16(x, by1), high1));
    x = _mm512_or_si512(_mm512_and_si512(x, low2), _mm512_and_si512(_mm512_srl_epi32(x, by2), high2));
    x = _mm512_or_si512(_mm512_and_si512(x, low4), _mm512_and_si512(_mm512_srl_epi64(x, by4), high4));
    _mm512_mask_storeu_epi8(dst, stored, _mm512_permutexvar_epi8(permute, x));
  }
  pack_tail(src, i, k, bits, dst - i / 8 * bits);
}

#elif defined(BITLINE_ISA_avx2)

inline __m256i load_halves(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

// 16 codes from the 2 * bits bytes of each 128-bit half: vpshufb moves the two bytes that a code may span to a 16-bit lane, a
// multiplication by a power of two is the variable shift that AVX2 lacks there and brings the code to the high byte's low bits.
void unpack(const uint8_t* src, int64_t k, int bits, uint8_t* dst) {
  alignas(32) uint8_t byte_index[2][32];
  alignas(32) uint16_t power[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 16; ++i) {
      const int bit = (8 * half + i % 8) * bits;
      byte_index[half][2 * i] = uint8_t(bit / 8), byte_index[half][2 * i + 1] = uint8_t(bit / 8 + 1);
      power[half][i] = uint16_t(1 << (8 - bit % 8));
    }
  }
  const __m256i* shuffles = reinterpret_cast<const __m256i*>(byte_index);
  const __m256i* powers = reinterpret_cast<const __m256i*>(power);
  const __m256i mask = _mm256_set1_epi8(char((1 << bits) - 1)), shuffle0 = shuffles[0], shuffle1 = shuffles[1];
  const __m256i power0 = powers[0], power1 = powers[1];
  const int64_t bytes = row_bytes(k, bits);
  int64_t i = 0, byte = 0;
  for (; i + 32 <= k && byte + 2 * bits + 16 <= bytes; i += 32, byte += 4 * bits) {
    const __m256i x = load_halves(src + byte, src + byte + 2 * bits);
    const __m256i a = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(x, shuffle0), power0), 8);
    const __m256i b = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(x, shuffle1), power1), 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), _mm256_and_si256(_mm256_packus_epi16(a, b), mask));
  }
  unpack_tail(src, i, k, bits, dst);
}

// pack8 in each 64-bit lane, then vpshufb closes the gaps within each 128-bit half.
void pack(const uint8_t* src, int64_t k, int bits, uint8_t* dst) {
  alignas(32) uint8_t byte_index[32];
  for (int i = 0; i < 32; ++i) byte_index[i] = i % 16 < 2 * bits ? uint8_t(i % 16 / bits * 8 + i % 16 % bits) : 0x80;
  const __m256i shuffle = *reinterpret_cast<const __m256i*>(byte_index);
  const uint64_t one = (1u << bits) - 1, two = (1u << 2 * bits) - 1, four = (1ull << 4 * bits) - 1;
  const __m256i low1 = _mm256_set1_epi16(short(one)), high1 = _mm256_set1_epi16(short(one << bits));
  const __m256i low2 = _mm256_set1_epi32(int(two)), high2 = _mm256_set1_epi32(int(two << 2 * bits));
  const __m256i low4 = _mm256_set1_epi64x((long long)four), high4 = _mm256_set1_epi64x((long long)(four << 4 * bits));
  const __m128i by1 = _mm_cvtsi32_si128(8 - bits), by2 = _mm_cvtsi32_si128(16 - 2 * bits), by4 = _mm_cvtsi32_si128(32 - 4 * bits);
  const int64_t bytes = row_bytes(k, bits);
  int64_t i = 0, byte = 0;
  for (; i + 32 <= k && byte + 2 * bits + 16 <= bytes; i += 32, byte += 4 * bits) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    x = _mm256_or_si256(_mm256_and_si256(x, low1), _mm256_and_si256(_mm256_srl_epi16(x, by1), high1));
    x = _mm256_or_si256(_mm256_and_si256(x, low2), _mm256_and_si256(_mm256_srl_epi32(x, by2), high2));
    x = _mm256_or_si256(_mm256_and_si256(x, low4), _mm256_and_si256(_mm256_srl_epi64(x, by4), high4));
    x = _mm256_shuffle_epi8(x, shuffle);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + byte), _mm256_castsi256_si128(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + byte + 2 * bits), _mm256_extracti128_si256(x, 1));
  }
  pack_tail(src, i, k, bits, dst);
}

#else

void unpack(const uint8_t* src, int64_t k, int bits, uint8_t* dst) { unpack_tail(src, 0, k, bits, dst); }
void pack(const uint8_t* src, int64_t k, int bits, uint8_t* dst) { pack_tail(src, 0, k, bits, dst); }

#endif

}  // namespace

extern const BitstreamKernels bitstream_kernels = {unpack, pack};

}  // namespace bitline::BITLINE_ISA

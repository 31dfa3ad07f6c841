// Activations as int8 slices: the operand of gemm_int8_slices.h.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <string.h>

#include "gemm.h"
#include "variants/gemm_slice_layout.h"

namespace bitline::BITLINE_ISA {
namespace {

// Columns of a K block in the order of the bytes of its byte vectors.
template <int BITS> struct ByteOrder {
  uint8_t column[k_block_of(BITS)];
};
template <int BITS> constexpr ByteOrder<BITS> make_byte_order() {
  ByteOrder<BITS> order{};
  for (int i = 0; i < k_block_of(BITS); ++i) order.column[i] = uint8_t(byte_column<BITS>(i / 4, i % 4));
  return order;
}

// A power of two that takes numbers up to `largest` below 2**bits, and its inverse.
struct FixedPoint {
  float multiplier, unit;
};
FixedPoint fixed_point(float largest, int bits) {
  int exponent = int(bits_of(largest) >> 23) - 126;  // largest < 2**exponent
  if (exponent < -64) exponent = -64;                // keeps the multiplier finite
  const auto power = [](int e) { return from_bits(uint32_t(e + 127) << 23); };
  return {power(bits - exponent), power(exponent - bits)};
}

// The bits of the largest absolute value; of integers the compiler makes vectors.
template <class Bits> Bits largest_bits(const Bits* v, int64_t n) {
  constexpr Bits magnitude = Bits(~Bits{}) >> 1;
  Bits most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits b = v[i] & magnitude;
    most = b > most ? b : most;
  }
  return most;
}

// The largest absolute value of n finite numbers.
float largest_of(const float* v, int64_t n) {
  typedef uint32_t __attribute__((may_alias)) Bits;
  return from_bits(largest_bits<Bits>(reinterpret_cast<const Bits*>(v), n));
}

// Whether fixed-point numbers hold x as well as float32 accumulators hold its products: x is finite, and not so small that
// units would be subnormal.
[[maybe_unused]] bool has_fixed_point_range(const void* x, int64_t n, Dtype dtype) {
  if (dtype == kFloat32) {
    const float largest = largest_of(static_cast<const float*>(x), n);
    return largest == 0 || (largest > 0x1p-32f && largest < __builtin_inff());  // false for NaN too
  }
  const uint32_t most = largest_bits(static_cast<const uint16_t*>(x), n);
  return dtype == kFloat16 ? most < 0x7c00 : most == 0 || (most > 0x2f80 && most < 0x7f80);  // 2**-32 and infinity
}

#ifdef __AVX2__

// Columns that are split at once: whole K blocks.
template <int BITS> constexpr int kSplitColumns = k_block_of(BITS) > 16 ? 32 : 16;

// Where the bytes of the byte vectors of kSplitColumns<BITS> columns come from: 16 columns each, 128 where not from them.
template <int BITS> struct ByteShuffles {
  static constexpr int kParts = kSplitColumns<BITS> / 16;
  uint8_t from[kParts][kParts][16];  // [out][in]
};
template <int BITS> constexpr ByteShuffles<BITS> make_byte_shuffles() {
  ByteShuffles<BITS> all{};
  constexpr int columns = k_block_of(BITS);
  constexpr ByteOrder<BITS> order = make_byte_order<BITS>();
  for (int i = 0; i < kSplitColumns<BITS>; ++i)
    for (int in = 0; in < ByteShuffles<BITS>::kParts; ++in) {
      const int column = i / columns * columns + order.column[i % columns];
      all.from[i / 16][in][i % 16] = uint8_t(column / 16 == in ? column % 16 : 128);
    }
  return all;
}

// 16 numbers as fixed-point ones. take_digit: the lowest digit, signed, of each; the rest is left.
#ifdef __AVX512BW__
struct Int32x16 {
  __m512i v;
  Int32x16(const float* p, float multiplier)
      : v(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(multiplier)))) {}
  template <int DIGIT_BITS> [[gnu::always_inline]] __m128i take_digit() {
    static_assert(DIGIT_BITS == 8);
    const __m128i digit = _mm512_cvtepi32_epi8(v);
    v = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
    return digit;
  }
};
#else
struct Int32x16 {
  __m256i v[2];
  Int32x16(const float* p, float multiplier) {
    for (int i = 0; i < 2; ++i) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(p + 8 * i), _mm256_set1_ps(multiplier)));
  }
  template <int DIGIT_BITS> [[gnu::always_inline]] __m128i take_digit() {
    __m256i digit[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i rest = _mm256_srai_epi32(_mm256_add_epi32(v[i], _mm256_set1_epi32(1 << (DIGIT_BITS - 1))), DIGIT_BITS);
      digit[i] = _mm256_sub_epi32(v[i], _mm256_slli_epi32(rest, DIGIT_BITS)), v[i] = rest;
    }
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(digit[0], digit[1]), 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
};
#endif

// Four int32 of each digit to out [4][COUNT].
template <int COUNT> void store_interleaved(const __m128i (&digits)[COUNT], uint32_t* out) {
  const auto store = [&](int at, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), v); };
  if constexpr (COUNT == 1) {
    store(0, digits[0]);
  } else if constexpr (COUNT == 2) {
    store(0, _mm_unpacklo_epi32(digits[0], digits[1])), store(4, _mm_unpackhi_epi32(digits[0], digits[1]));
  } else if constexpr (COUNT == 3) {
    uint32_t four[3][4];
    for (int s = 0; s < 3; ++s) _mm_storeu_si128(reinterpret_cast<__m128i*>(four[s]), digits[s]);
    for (int i = 0; i < 12; ++i) out[i] = four[i % 3][i / 3];
  } else {
    const __m128i low0 = _mm_unpacklo_epi32(digits[0], digits[1]), high0 = _mm_unpackhi_epi32(digits[0], digits[1]);
    const __m128i low1 = _mm_unpacklo_epi32(digits[2], digits[3]), high1 = _mm_unpackhi_epi32(digits[2], digits[3]);
    store(0, _mm_unpacklo_epi64(low0, low1)), store(4, _mm_unpackhi_epi64(low0, low1));
    store(8, _mm_unpacklo_epi64(high0, high1)), store(12, _mm_unpackhi_epi64(high0, high1));
  }
}

// Digits of kSplitColumns<BITS> numbers at v to out [byte vector][COUNT]; they are added to `sums`.
template <int BITS, int COUNT>
[[gnu::always_inline]] inline void split_columns(const float* v, float multiplier, uint32_t* out, __m128i (&sums)[COUNT]) {
  constexpr int parts = kSplitColumns<BITS> / 16;
  static constexpr ByteShuffles<BITS> shuffles = make_byte_shuffles<BITS>();
  const __m128i ones8 = _mm_set1_epi8(1), ones16 = _mm_set1_epi16(1);
  __m128i digits[parts][COUNT];
  for (int part = 0; part < parts; ++part) {
    Int32x16 rest(v + 16 * part, multiplier);
    for (int s = 0; s < COUNT; ++s) {
      const __m128i d = digits[part][s] = rest.template take_digit<slice_bits(BITS)>();
      sums[s] = _mm_add_epi32(sums[s], _mm_madd_epi16(_mm_maddubs_epi16(ones8, d), ones16));
    }
  }
  for (int to = 0; to < parts; ++to) {
    __m128i ordered[COUNT];
    for (int s = 0; s < COUNT; ++s)
      for (int part = 0; part < parts; ++part) {
        const __m128i from = _mm_loadu_si128(reinterpret_cast<const __m128i*>(shuffles.from[to][part]));
        const __m128i bytes = _mm_shuffle_epi8(digits[part][s], from);
        ordered[s] = part == 0 ? bytes : _mm_or_si128(ordered[s], bytes);
      }
    store_interleaved(ordered, out + 4 * COUNT * to);
  }
}

// Digits of n numbers times `multiplier`, n a multiple of the K block: out [byte vector][COUNT], and the sum of each digit.
template <int BITS, int COUNT> void split(const float* v, int64_t n, float multiplier, uint32_t* out, int32_t* sums) {
  constexpr int columns = kSplitColumns<BITS>, out_int32 = columns / 4 * COUNT;
  __m128i sum[COUNT]{};
  int64_t i = 0;
  for (; i + columns <= n; i += columns, out += out_int32) split_columns<BITS>(v + i, multiplier, out, sum);
  if (i < n) {
    float tail[columns] = {};
    uint32_t tail_out[out_int32];
    memcpy(tail, v + i, size_t(n - i) * 4);
    split_columns<BITS>(tail, multiplier, tail_out, sum);
    memcpy(out, tail_out, size_t((n - i) * COUNT));
  }
  for (int s = 0; s < COUNT; ++s) {
    const __m128i pairs = _mm_add_epi32(sum[s], _mm_shuffle_epi32(sum[s], 0x4E));
    sums[s] = _mm_cvtsi128_si32(_mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0xB1)));
  }
}

#else

constexpr int kSliceChunk = 128;  // columns split at a time; a multiple of every K block

// Digits [count][n] of n numbers times `multiplier`; the sum of each digit is added to sums.
void split_chunk(const float* v, int64_t n, float multiplier, int count, int bits, int8_t (*digits)[kSliceChunk], int32_t* sums) {
  int32_t q[kSliceChunk];
  for (int64_t i = 0; i < n; ++i) q[i] = int32_t(__builtin_rintf(v[i] * multiplier));
  const int32_t half = 1 << (bits - 1), mask = (1 << bits) - 1;
  for (int s = 0; s < count; ++s) {
    const bool last = s == count - 1;
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t d = last ? q[i] : ((q[i] + half) & mask) - half;
      digits[s][i] = int8_t(d), q[i] = (q[i] - d) >> bits, sum += d;
    }
    sums[s] += sum;
  }
}

// Digits to int32 of four columns each: out [byte vector][count].
template <int BITS> void order_chunk(const int8_t (*digits)[kSliceChunk], int64_t n, int count, uint32_t* out) {
  static constexpr ByteOrder<BITS> order = make_byte_order<BITS>();
  constexpr int columns = k_block_of(BITS);
  for (int64_t i = 0; i < n; i += columns)
    for (int j = 0; j < columns / 4; ++j, out += count)
      for (int s = 0; s < count; ++s) {
        const int8_t* from = digits[s] + i;
        const uint8_t* at = order.column + 4 * j;
        const int8_t four[4] = {from[at[0]], from[at[1]], from[at[2]], from[at[3]]};
        memcpy(out + s, four, 4);
      }
}

// Digits of n numbers times `multiplier`, n a multiple of the K block: out [byte vector][COUNT], and the sum of each digit.
template <int BITS, int COUNT> void split(const float* v, int64_t n, float multiplier, uint32_t* out, int32_t* sums) {
  for (int s = 0; s < COUNT; ++s) sums[s] = 0;
  for (int64_t i = 0; i < n; i += kSliceChunk) {
    const int64_t count = n - i < kSliceChunk ? n - i : kSliceChunk;
    int8_t digits[COUNT][kSliceChunk];
    split_chunk(v + i, count, multiplier, COUNT, slice_bits(BITS), digits, sums);
    order_chunk<BITS>(digits, count, COUNT, out + i / 4 * COUNT);
  }
}

#endif

// One group of a row: out [byte vector][slice], its scale, and -code_zero times the sum of each slice, `stride` apart.
void pack_slices(const GemmCall& c, const float* v, uint32_t* out, float* x_scale, int32_t* acc_init, int64_t stride) {
  const PackedHeader& w = *c.w;
  const int count = c.slices.count, bits = slice_bits(int(w.bits));
  const FixedPoint f = c.slices.x_is_int8 ? FixedPoint{1, 1} : fixed_point(largest_of(v, w.group_k), bits * count - 2);
  int32_t sums[kMaxSlices];
  with_bits(w.bits, [&]<int BITS>() {
    switch (count) {
      case 1: return split<BITS, 1>(v, w.group_k, f.multiplier, out, sums);
      case 2: return split<BITS, 2>(v, w.group_k, f.multiplier, out, sums);
      case 3: return split<BITS, 3>(v, w.group_k, f.multiplier, out, sums);
      default: return split<BITS, 4>(v, w.group_k, f.multiplier, out, sums);
    }
  });
  *x_scale = f.unit * c.slices.code_unit;
  for (int s = 0; s < count; ++s) acc_init[s * stride] = -c.slices.code_zero * sums[s];
}

}  // namespace
}  // namespace bitline::BITLINE_ISA

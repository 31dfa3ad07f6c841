// Activations as int8 slices: the operand of gemm_int8_slices.h.
#pragma once

#ifdef __SSSE3__
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

// A power of two by which |v| < 2**limit becomes at most 2**bits, and its inverse.
struct FixedPoint {
  float multiplier, unit;
};
FixedPoint fixed_point(float largest, int bits) {
  uint32_t b;
  memcpy(&b, &largest, 4);
  int exponent = int(b >> 23) - 126;                  // largest < 2**exponent
  if (exponent < -64) exponent = -64;                 // keeps the multiplier finite
  const auto power = [](int e) {
    const uint32_t p = uint32_t(e + 127) << 23;
    float f;
    memcpy(&f, &p, 4);
    return f;
  };
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
  const uint32_t b = largest_bits<Bits>(reinterpret_cast<const Bits*>(v), n);
  float f;
  memcpy(&f, &b, 4);
  return f;
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
  int64_t i = 0;
#ifdef __SSSE3__
  if constexpr (16 % columns == 0) {
    alignas(16) uint8_t within[16];  // of 16 columns
    for (int j = 0; j < 16; ++j) within[j] = uint8_t(j / columns * columns + order.column[j % columns]);
    const __m128i shuffle = _mm_load_si128(reinterpret_cast<const __m128i*>(within));
    const auto load16 = [&](int s) {
      return _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(digits[s] + i)), shuffle);
    };
    for (; i + 16 <= n; i += 16, out += 4 * count) {
      int s = 0;
      if (count == 2) {
        const __m128i d0 = load16(0), d1 = load16(1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi32(d0, d1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4), _mm_unpackhi_epi32(d0, d1));
        s = 2;
      }
      for (; s < count; ++s) {
        uint32_t four[4];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(four), load16(s));
        for (int j = 0; j < 4; ++j) out[j * count + s] = four[j];
      }
    }
  }
#endif
  for (; i < n; i += columns)
    for (int j = 0; j < columns / 4; ++j, out += count)
      for (int s = 0; s < count; ++s) {
        const int8_t* from = digits[s] + i;
        const uint8_t* at = order.column + 4 * j;
        const int8_t four[4] = {from[at[0]], from[at[1]], from[at[2]], from[at[3]]};
        memcpy(out + s, four, 4);
      }
}

// One group of a row: out [byte vector][slice], its scale, and -code_zero times the sum of each slice, `stride` apart.
void pack_slices(const GemmCall& c, const float* v, uint32_t* out, float* x_scale, int32_t* acc_init, int64_t stride) {
  const PackedHeader& w = *c.w;
  const int count = c.slices.count, bits = slice_bits(int(w.bits));
  const FixedPoint f = c.slices.x_is_int8 ? FixedPoint{1, 1} : fixed_point(largest_of(v, w.group_k), bits * count - 2);
  int32_t sums[kMaxSlices] = {};
  for (int64_t i = 0; i < w.group_k; i += kSliceChunk) {
    const int64_t n = w.group_k - i < kSliceChunk ? w.group_k - i : kSliceChunk;
    int8_t digits[kMaxSlices][kSliceChunk];
    split_chunk(v + i, n, f.multiplier, count, bits, digits, sums);
    with_bits(w.bits, [&]<int BITS>() { order_chunk<BITS>(digits, n, count, out + i / 4 * count); });
  }
  *x_scale = f.unit * c.slices.code_unit;
  for (int s = 0; s < count; ++s) acc_init[s * stride] = -c.slices.code_zero * sums[s];
}

}  // namespace
}  // namespace bitline::BITLINE_ISA

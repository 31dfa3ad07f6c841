// Dequantization in registers with AVX-512, for each bit width, and the compute types' multiply-adds.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the intrinsics' own "undefined" operands
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "gemm.h"

namespace bitline::BITLINE_ISA {
namespace {

#ifdef BITLINE_EMULATED
#define INLINE inline
#define UNROLL
#else
#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")
#endif

INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }
INLINE __m512i shift_right(__m512i v, int n) { return n > 0 ? _mm512_srli_epi16(v, n) : n < 0 ? _mm512_slli_epi16(v, -n) : v; }
// Bits of a where the mask is set, of b elsewhere.
INLINE __m512i select_bits(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

// The look-up table of bfloat16 values. Entries past 2**BITS repeat, so that the bits above an index do not matter.
template <int BITS> struct Lut {
  __m512i t[BITS == 8 ? 8 : BITS == 6 ? 2 : 1];
  INLINE explicit Lut(const GemmCall& c) {
    const uint16_t* v = reinterpret_cast<const uint16_t*>(c.base + c.w->lut_bf16);
    if constexpr (BITS < 6) {
      t[0] = load(v);
    } else if constexpr (BITS == 6) {
      t[0] = load(v), t[1] = load(v + 32);
    } else {
      UNROLL for (int i = 0; i < 8; i++) t[i] = load(v + 32 * i);
    }
  }
};

// The codes of 16 rows and one K block, as bit_position() places them. bf16_pair(j): the values of columns 2j and 2j+1, row r
// in 32-bit lane r.
template <int BITS> struct KBlock;

template <> struct KBlock<2> {
  static constexpr int vectors = 1, columns = 16;
  __m512i v;
  INLINE void read(const uint8_t* p) { v = load(p); }
  INLINE __m512i bf16_pair(const Lut<2>& lut, int j) const { return _mm512_permutexvar_epi16(shift_right(v, 2 * j), lut.t[0]); }
};
template <> struct KBlock<3> {
  static constexpr int vectors = 3, columns = 32;
  __m512i v[3];
  INLINE void read(const uint8_t* p) { UNROLL for (int i = 0; i < 3; i++) v[i] = load(p + 128 * i); }
  INLINE __m512i bf16_pair(const Lut<3>& lut, int j) const {
    if (j < 15) return _mm512_permutexvar_epi16(shift_right(v[j / 5], 3 * (j % 5)), lut.t[0]);
    const __m512i low = select_bits(_mm512_set1_epi16(1), shift_right(v[0], 15), shift_right(v[1], 14));
    return _mm512_permutexvar_epi16(select_bits(_mm512_set1_epi16(3), low, shift_right(v[2], 13)), lut.t[0]);
  }
};
template <> struct KBlock<4> {
  static constexpr int vectors = 1, columns = 8;
  __m512i v;
  INLINE void read(const uint8_t* p) { v = load(p); }
  INLINE __m512i bf16_pair(const Lut<4>& lut, int j) const { return _mm512_permutexvar_epi16(shift_right(v, 4 * j), lut.t[0]); }
};
template <> struct KBlock<5> {
  static constexpr int vectors = 5, columns = 32;
  __m512i v[5];
  INLINE void read(const uint8_t* p) { UNROLL for (int i = 0; i < 5; i++) v[i] = load(p + 128 * i); }
  INLINE __m512i bf16_pair(const Lut<5>& lut, int j) const {
    if (j < 15) return _mm512_permutexvar_epi16(shift_right(v[j / 3], 5 * (j % 3)), lut.t[0]);
    __m512i low = shift_right(v[0], 15);
    UNROLL for (int i = 1; i < 5; i++) low = select_bits(_mm512_set1_epi16(short((1 << i) - 1)), low, shift_right(v[i], 15 - i));
    return _mm512_permutexvar_epi16(low, lut.t[0]);
  }
};
template <> struct KBlock<6> {
  static constexpr int vectors = 3, columns = 16;
  __m512i v[3];
  INLINE void read(const uint8_t* p) { UNROLL for (int i = 0; i < 3; i++) v[i] = load(p + 128 * i); }
  INLINE __m512i bf16_pair(const Lut<6>& lut, int j) const {
    const __m512i index = j < 6 ? shift_right(v[j / 2], 6 * (j % 2))
                                : select_bits(_mm512_set1_epi16(15), shift_right(v[j - 6], 12), shift_right(v[2], 2 * j - 4));
    return _mm512_permutex2var_epi16(lut.t[0], index, lut.t[1]);
  }
};
template <> struct KBlock<8> {
  static constexpr int vectors = 1, columns = 4;
  __m512i v;
  INLINE void read(const uint8_t* p) { v = load(p); }
  // lut.t[0..3] hold the values' low bytes, t[4..7] their high bytes.
  INLINE __m512i bf16_pair(const Lut<8>& lut, int j) const {
    __mmask64 top = _mm512_movepi8_mask(v);
    __m512i low = _mm512_permutex2var_epi8(lut.t[0], v, lut.t[1]), high = _mm512_permutex2var_epi8(lut.t[4], v, lut.t[5]);
    low = _mm512_mask_blend_epi8(top, low, _mm512_permutex2var_epi8(lut.t[2], v, lut.t[3]));
    high = _mm512_mask_blend_epi8(top, high, _mm512_permutex2var_epi8(lut.t[6], v, lut.t[7]));
    __m512i even = _mm512_set1_epi16(0xff);
    return j == 0 ? select_bits(even, low, _mm512_slli_epi16(high, 8)) : select_bits(even, _mm512_srli_epi16(low, 8), high);
  }
};

INLINE __m512 low_f32(__m512i bf16_pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_pair, 16)); }
INLINE __m512 high_f32(__m512i bf16_pair) {
  return _mm512_castsi512_ps(_mm512_and_si512(bf16_pair, _mm512_set1_epi32(int(0xffff0000))));
}

// A compute type: operand j of a K block is a vector of int32, k_per_operand columns of 16 rows, and is multiplied with one
// int32 of x. max_rows: of an M tile. digits: slices of x (gemm_avx512_slices.cpp), each multiplied as a row of its own.
struct ComputeBF16 {
  static constexpr int k_per_operand = 2, digits = 1, max_rows = kMaxTileM;
  using Acc = __m512;
  template <int BITS> using LutOf = Lut<BITS>;
  static INLINE Acc init(const int32_t*, int64_t) { return _mm512_setzero_ps(); }
  template <int BITS> static INLINE __m512i operand(const KBlock<BITS>& codes, const Lut<BITS>& lut, int j) {
    return codes.bf16_pair(lut, j);
  }
  static INLINE Acc mac(Acc acc, __m512i w, uint32_t x) {
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
  }
  static INLINE Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static INLINE __m512 to_f32(Acc acc) { return acc; }
};

template <int BITS> struct LutF32 : Lut<BITS> {
  using Lut<BITS>::Lut;
};
template <> struct LutF32<4> {
  __m512 t;
  INLINE explicit LutF32(const GemmCall& c) : t(_mm512_loadu_ps(c.base + c.w->lut_f32)) {}
};
struct ComputeF32 {
  static constexpr int k_per_operand = 1, digits = 1, max_rows = kMaxTileM;
  using Acc = __m512;
  template <int BITS> using LutOf = LutF32<BITS>;
  static INLINE Acc init(const int32_t*, int64_t) { return _mm512_setzero_ps(); }
  template <int BITS> static INLINE __m512i operand(const KBlock<BITS>& codes, const LutF32<BITS>& lut, int j) {
    if constexpr (BITS == 4) {
      int shift = 4 * (j / 2) + 16 * (j % 2);
      return _mm512_castps_si512(_mm512_permutexvar_ps(shift ? _mm512_srli_epi32(codes.v, shift) : codes.v, lut.t));
    } else {
      __m512i pair = codes.bf16_pair(lut, j / 2);
      return _mm512_castps_si512(j % 2 ? high_f32(pair) : low_f32(pair));
    }
  }
  static INLINE Acc mac(Acc acc, __m512i w, uint32_t x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(_mm512_set1_epi32(int(x))), acc);
  }
  static INLINE Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static INLINE __m512 to_f32(Acc acc) { return acc; }
};

// VNNI: unsigned codes as bytes times int8; convert_to_compute_type puts x's columns into the order of the codes' bytes.
struct ComputeInt8 {
  static constexpr int k_per_operand = 4, digits = 1, max_rows = kMaxTileM;
  using Acc = __m512i;
  template <int BITS> struct LutOf {
    INLINE explicit LutOf(const GemmCall&) {}
  };
  static INLINE Acc init(const int32_t* acc_init, int64_t i) { return _mm512_set1_epi32(acc_init[i]); }
  template <int BITS> static INLINE __m512i operand(const KBlock<BITS>& codes, const LutOf<BITS>&, int j) {
    if constexpr (BITS == 8) return codes.v;
    return _mm512_and_si512(j ? _mm512_srli_epi16(codes.v, 4) : codes.v, _mm512_set1_epi8(15));
  }
  // Inline assembly: around the intrinsic GCC 12 copies each accumulator, and 24 of them no longer fit the registers.
  static INLINE Acc mac(Acc acc, __m512i w, uint32_t x) {
    const __m512i broadcast = _mm512_set1_epi32(int(x));
#ifdef BITLINE_EMULATED
    return _mm512_dpbusd_epi32(acc, w, broadcast);
#else
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(broadcast));
    return acc;
#endif
  }
  static INLINE Acc add(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
  static INLINE __m512 to_f32(Acc acc) { return _mm512_cvtepi32_ps(acc); }
};

// 16 scales or offsets from element i on as float32. super_scales: of the same rows, where the type has a second level.
INLINE __m512 load_scales(const uint8_t* p, int64_t type, int64_t i, const float* super_scales) {
  auto int_to_f32 = [&](bool is_signed) {
    __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
  };
  switch (type) {
    case kF32: return _mm512_loadu_ps(p + 4 * i);
    case kBF16: return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 * i))), 16));
    case kF16: return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 * i)));
    case kU8: return _mm512_mul_ps(int_to_f32(false), _mm512_loadu_ps(super_scales));
    case kI8: return _mm512_mul_ps(int_to_f32(true), _mm512_loadu_ps(super_scales));
    case kZeroPoint: return int_to_f32(true);
    default: {  // E4M3: its exponent and mantissa at float32's bit positions are 2**-120 times the value
      __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)));
      __m512i bits = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(b, _mm512_set1_epi32(127)), 20),
                                     _mm512_slli_epi32(_mm512_and_si512(b, _mm512_set1_epi32(128)), 24));
      __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
      return _mm512_mul_ps(v, _mm512_loadu_ps(super_scales));
    }
  }
}

// Of 16 rows of a group, whose share of y is scale * sum(code * x) + offset * sum(x).
struct ScaleOffset {
  __m512 scale, offset;
};

// A cursor over the scales and offsets of an N block's groups. One pointer that advances is cheaper than a division in each
// group.
struct ScaleCursor {
  const uint8_t *scales, *offsets;
  const float *super_scales, *super_offsets;
  int64_t type, offset_type, bytes, offset_bytes;
  int64_t per;   // groups that share super-block scales
  int64_t left;  // of them, from the current group on
  static INLINE int64_t itemsize(int64_t type) { return type == kNone ? 0 : type == kF32 ? 4 : type <= kF16 ? 2 : 1; }
  INLINE ScaleCursor(const PackedHeader& w, const uint8_t* base, int64_t block, int64_t g)
      : type(w.scale_type), offset_type(w.offset_type), bytes(itemsize(type) * kBlockN),
        offset_bytes(itemsize(offset_type) * kBlockN), per(w.super_scales ? w.groups_per_super_scale : INT64_MAX),
        left(per - g % per) {
    const int64_t super_index = w.super_scales ? (block * ((w.num_groups + per - 1) / per) + g / per) * kBlockN : 0;
    scales = base + w.scales + (block * w.num_groups + g) * bytes;
    offsets = base + w.offsets + (block * w.num_groups + g) * offset_bytes;
    super_scales = reinterpret_cast<const float*>(base + w.super_scales) + super_index;
    super_offsets = reinterpret_cast<const float*>(base + w.super_offsets) + super_index;
  }
  // Rows 0-15 or 16-31 of the current group.
  INLINE ScaleOffset half(int i) const {
    ScaleOffset a;
    a.scale = load_scales(scales, type, 16 * i, super_scales + 16 * i), a.offset = _mm512_setzero_ps();
    if (offset_type == kNone) return a;
    a.offset = load_scales(offsets, offset_type, 16 * i, super_offsets + 16 * i);
    if (offset_type == kZeroPoint) a.offset = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(a.scale, a.offset));
    return a;
  }
  // All 32 rows of the current group.
  INLINE void store(float* to_scales, float* to_offsets) const {
    UNROLL for (int i = 0; i < 2; i++) {
      const ScaleOffset a = half(i);
      _mm512_store_ps(to_scales + 16 * i, a.scale), _mm512_store_ps(to_offsets + 16 * i, a.offset);
    }
  }
  INLINE void next() {
    scales += bytes, offsets += offset_bytes;
    if (--left == 0) super_scales += kBlockN, super_offsets += kBlockN, left = per;
  }
};

}  // namespace
}  // namespace bitline::BITLINE_ISA

// Packed codes to numbers with AVX-512: one decoder for each width.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the intrinsics' own "undefined" operands
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "gemm.h"


namespace bitline::BITLINE_LEVEL {
namespace {

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }
INLINE __m512i shr(__m512i v, int n) { return n > 0 ? _mm512_srli_epi16(v, n) : n < 0 ? _mm512_slli_epi16(v, -n) : v; }
// Bits of `a` where mask is set, of `b` elsewhere.
INLINE __m512i select_bits(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

// A look-up table of bfloat16 values; entries past the width's repeat, so that bits above an index do not matter.
template <int BITS> struct Table {
  __m512i t[BITS == 8 ? 8 : BITS == 6 ? 2 : 1];
  INLINE explicit Table(const uint8_t* base, const Meta& w) {
    const uint16_t* v = reinterpret_cast<const uint16_t*>(base + w.table16);
    if constexpr (BITS < 6) {
      t[0] = load(v);
    } else if constexpr (BITS == 6) {
      t[0] = load(v), t[1] = load(v + 32);
    } else {
      UNROLL for (int i = 0; i < 8; i++) t[i] = load(v + 32 * i);
    }
  }
};

// The vectors of 16 rows and one step, as place() has codes in them, and pair(j): bfloat16 values of columns 2j and 2j+1, row r in 32-bit lane r.
template <int BITS> struct Codes;

template <> struct Codes<2> {
  static constexpr int vectors = 1, step = 16;
  __m512i v;
  INLINE void read(const uint8_t* p) { v = load(p); }
  INLINE __m512i pair(const Table<2>& t, int j) const { return _mm512_permutexvar_epi16(shr(v, 2 * j), t.t[0]); }
};
template <> struct Codes<3> {
  static constexpr int vectors = 3, step = 32;
  __m512i v[3];
  INLINE void read(const uint8_t* p) { UNROLL for (int i = 0; i < 3; i++) v[i] = load(p + 128 * i); }
  INLINE __m512i pair(const Table<3>& t, int j) const {
    if (j < 15) return _mm512_permutexvar_epi16(shr(v[j / 5], 3 * (j % 5)), t.t[0]);
    const __m512i low = select_bits(_mm512_set1_epi16(1), shr(v[0], 15), shr(v[1], 14));
    return _mm512_permutexvar_epi16(select_bits(_mm512_set1_epi16(3), low, shr(v[2], 13)), t.t[0]);
  }
};
template <> struct Codes<4> {
  static constexpr int vectors = 1, step = 8;
  __m512i v;
  INLINE void read(const uint8_t* p) { v = load(p); }
  INLINE __m512i pair(const Table<4>& t, int j) const { return _mm512_permutexvar_epi16(shr(v, 4 * j), t.t[0]); }
};
template <> struct Codes<5> {
  static constexpr int vectors = 5, step = 32;
  __m512i v[5];
  INLINE void read(const uint8_t* p) { UNROLL for (int i = 0; i < 5; i++) v[i] = load(p + 128 * i); }
  INLINE __m512i pair(const Table<5>& t, int j) const {
    if (j < 15) return _mm512_permutexvar_epi16(shr(v[j / 3], 5 * (j % 3)), t.t[0]);
    __m512i low = shr(v[0], 15);
    UNROLL for (int i = 1; i < 5; i++) low = select_bits(_mm512_set1_epi16(short((1 << i) - 1)), low, shr(v[i], 15 - i));
    return _mm512_permutexvar_epi16(low, t.t[0]);
  }
};
template <> struct Codes<6> {
  static constexpr int vectors = 3, step = 16;
  __m512i v[3];
  INLINE void read(const uint8_t* p) { UNROLL for (int i = 0; i < 3; i++) v[i] = load(p + 128 * i); }
  INLINE __m512i pair(const Table<6>& t, int j) const {
    const __m512i index = j < 6 ? shr(v[j / 2], 6 * (j % 2))
                                : select_bits(_mm512_set1_epi16(15), shr(v[j - 6], 12), shr(v[2], 2 * j - 4));
    return _mm512_permutex2var_epi16(t.t[0], index, t.t[1]);
  }
};
template <> struct Codes<8> {
  static constexpr int vectors = 1, step = 4;
  __m512i v;
  INLINE void read(const uint8_t* p) { v = load(p); }
  // Table vectors 0..3 hold the values' low bytes, 4..7 their high ones.
  INLINE __m512i pair(const Table<8>& t, int j) const {
    __mmask64 top = _mm512_movepi8_mask(v);
    __m512i low = _mm512_permutex2var_epi8(t.t[0], v, t.t[1]), high = _mm512_permutex2var_epi8(t.t[4], v, t.t[5]);
    low = _mm512_mask_blend_epi8(top, low, _mm512_permutex2var_epi8(t.t[2], v, t.t[3]));
    high = _mm512_mask_blend_epi8(top, high, _mm512_permutex2var_epi8(t.t[6], v, t.t[7]));
    __m512i even = _mm512_set1_epi16(0xff);
    return j == 0 ? select_bits(even, low, _mm512_slli_epi16(high, 8)) : select_bits(even, _mm512_srli_epi16(low, 8), high);
  }
};

INLINE __m512 low_half(__m512i pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }
INLINE __m512 high_half(__m512i pair) { return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000)))); }

// What a mode multiplies: words of the weight against words of the input.
struct ModeBF16 {
  static constexpr int per_word = 2;
  using Acc = __m512;
  template <int BITS> using Tab = Table<BITS>;
  static INLINE Acc start(const int32_t*, int64_t) { return _mm512_setzero_ps(); }
  template <int BITS> static INLINE __m512i word(const Codes<BITS>& c, const Table<BITS>& t, int j) { return c.pair(t, j); }
  static INLINE Acc mac(Acc a, __m512i w, uint32_t x) {
    return _mm512_dpbf16_ps(a, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
  }
  static INLINE Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static INLINE __m512 sum(Acc a) { return a; }
};

template <int BITS> struct Table32 : Table<BITS> {
  using Table<BITS>::Table;
};
template <> struct Table32<4> {
  __m512 t;
  INLINE explicit Table32(const uint8_t* base, const Meta& w) : t(_mm512_loadu_ps(base + w.table32)) {}
};
struct ModeF32 {
  static constexpr int per_word = 1;
  using Acc = __m512;
  template <int BITS> using Tab = Table32<BITS>;
  static INLINE Acc start(const int32_t*, int64_t) { return _mm512_setzero_ps(); }
  template <int BITS> static INLINE __m512i word(const Codes<BITS>& c, const Table32<BITS>& t, int j) {
    if constexpr (BITS == 4) {
      int by = 4 * (j / 2) + 16 * (j % 2);
      return _mm512_castps_si512(_mm512_permutexvar_ps(by ? _mm512_srli_epi32(c.v, by) : c.v, t.t));
    } else {
      __m512i p = c.pair(t, j / 2);
      return _mm512_castps_si512(j % 2 ? high_half(p) : low_half(p));
    }
  }
  static INLINE Acc mac(Acc a, __m512i w, uint32_t x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(_mm512_set1_epi32(int(x))), a);
  }
  static INLINE Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static INLINE __m512 sum(Acc a) { return a; }
};

// Unsigned codes as bytes against int8; columns of a step are taken in the order of input_column().
struct ModeI8 {
  static constexpr int per_word = 4;
  using Acc = __m512i;
  template <int BITS> struct Tab {
    INLINE explicit Tab(const uint8_t*, const Meta&) {}
  };
  static INLINE Acc start(const int32_t* s, int64_t i) { return _mm512_set1_epi32(s[i]); }
  template <int BITS> static INLINE __m512i word(const Codes<BITS>& c, const Tab<BITS>&, int j) {
    if constexpr (BITS == 8) return c.v;
    return _mm512_and_si512(j ? _mm512_srli_epi16(c.v, 4) : c.v, _mm512_set1_epi8(15));
  }
  // Not the intrinsic: GCC 12 copies each sum around it, and 24 of them no longer fit in registers.
  static INLINE Acc mac(Acc a, __m512i w, uint32_t x) {
    const __m512i broadcast = _mm512_set1_epi32(int(x));
    __asm__("vpdpbusd %2, %1, %0" : "+v"(a) : "v"(w), "v"(broadcast));
    return a;
  }
  static INLINE Acc add(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
  static INLINE __m512 sum(Acc a) { return _mm512_cvtepi32_ps(a); }
};

// 16 numbers of a scale or offset stream as float32.
INLINE __m512 stream(const uint8_t* p, int64_t type, int64_t i, const float* coarse) {
  auto bytes = [&](bool is_signed) {
    __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
  };
  switch (type) {
    case kF32: return _mm512_loadu_ps(p + 4 * i);
    case kBF16: return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 * i))), 16));
    case kF16: return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 * i)));
    case kU8: return _mm512_mul_ps(bytes(false), _mm512_loadu_ps(coarse));
    case kI8: return _mm512_mul_ps(bytes(true), _mm512_loadu_ps(coarse));
    case kZero: return bytes(true);
    default: {  // E4M3: exponent and mantissa moved to float32's place are 2**-120 times the value
      __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)));
      __m512i bits = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(b, _mm512_set1_epi32(127)), 20),
                                     _mm512_slli_epi32(_mm512_and_si512(b, _mm512_set1_epi32(128)), 24));
      __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
      return _mm512_mul_ps(v, _mm512_loadu_ps(coarse));
    }
  }
}

// Scale and offset of 16 rows of a group: a group's part of the result is scale * sum(code * x) + offset * sum(x).
struct Affine {
  __m512 s, o;
};

// The scales and offsets of a block's groups, one group after another from group g on.
struct Scales {
  const uint8_t *s, *o;
  const float *coarse_s, *coarse_o;
  int64_t type, offset_type, bytes, offset_bytes, ratio, left;  // left: groups that share the coarse ones, from this one on
  static INLINE int64_t size(int64_t type) { return type == kNone ? 0 : type == kF32 ? 4 : type <= kF16 ? 2 : 1; }
  INLINE Scales(const Meta& w, const uint8_t* base, int64_t block, int64_t g)
      : type(w.scale_type), offset_type(w.offset_type), bytes(size(type) * kRows), offset_bytes(size(offset_type) * kRows),
        ratio(w.coarse_scales ? w.coarse_ratio : INT64_MAX), left(ratio - g % ratio) {
    const int64_t cell = w.coarse_scales ? (block * ((w.groups + ratio - 1) / ratio) + g / ratio) * kRows : 0;
    s = base + w.scales + (block * w.groups + g) * bytes, o = base + w.offsets + (block * w.groups + g) * offset_bytes;
    coarse_s = reinterpret_cast<const float*>(base + w.coarse_scales) + cell;
    coarse_o = reinterpret_cast<const float*>(base + w.coarse_offsets) + cell;
  }
  INLINE Affine half(int i) const {
    Affine a;
    a.s = stream(s, type, 16 * i, coarse_s + 16 * i), a.o = _mm512_setzero_ps();
    if (offset_type == kNone) return a;
    a.o = stream(o, offset_type, 16 * i, coarse_o + 16 * i);
    if (offset_type == kZero) a.o = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(a.s, a.o));
    return a;
  }
  INLINE void next() {
    s += bytes, o += offset_bytes;
    if (--left == 0) coarse_s += kRows, coarse_o += kRows, left = ratio;
  }
};

}  // namespace
}  // namespace bitline::BITLINE_LEVEL

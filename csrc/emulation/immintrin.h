// Stands in for the compiler's <immintrin.h> where BITLINE_EMULATE builds the AVX-512 and AMX levels for a CPU with AVX2 only: what
// these levels use of AVX-512, and AMX tiles, in plain C++. For tests of their results; its speed says nothing.
#pragma once

#include_next <immintrin.h>
#include <stdint.h>
#include <string.h>

// Not inlined: inlined into unrolled loops, these functions take GCC minutes.
#define BITLINE_SLOW __attribute__((noinline, unused))

namespace bitline_emulation {
namespace {

template <class E> struct Lanes {
  static constexpr int count = 64 / sizeof(E);
  E e[count];
  Lanes() : e{} {}
  template <class V> explicit Lanes(const V& v) {
    static_assert(sizeof(V) == 64);
    memcpy(e, &v, 64);
  }
  template <class V> operator V() const {
    static_assert(sizeof(V) == 64);
    V v;
    memcpy(&v, e, 64);
    return v;
  }
};
// Result of 64 bytes whose lane i, of type E, is f(i).
template <class V, class E, class F> BITLINE_SLOW V each(F f) {
  Lanes<E> r;
  for (int i = 0; i < Lanes<E>::count; ++i) r.e[i] = E(f(i));
  return r;
}
template <class V> BITLINE_SLOW V load64(const void* p) {
  V v;
  memcpy(&v, p, 64);
  return v;
}
BITLINE_SLOW float bf16_to_f32(uint16_t h) {
  const uint32_t b = (h & 0x7f80) == 0 ? uint32_t(h & 0x8000) << 16 : uint32_t(h) << 16;  // denormals are zero
  float v;
  memcpy(&v, &b, 4);
  return v;
}
BITLINE_SLOW uint16_t f32_to_bf16(float v) {
  uint32_t b;
  memcpy(&b, &v, 4);
  if (v != v) return uint16_t(b >> 16 | 0x40);
  if ((b & 0x7f800000) == 0) return uint16_t(b >> 16 & 0x8000);
  return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
BITLINE_SLOW float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

using I = __m512i;
using F = __m512;
using U8 = Lanes<uint8_t>;
using U16 = Lanes<uint16_t>;
using U32 = Lanes<uint32_t>;
using U64 = Lanes<uint64_t>;
using S32 = Lanes<int32_t>;
using F32 = Lanes<float>;

BITLINE_SLOW I set1_8(char v) { return each<I, uint8_t>([=](int) { return uint8_t(v); }); }
BITLINE_SLOW I set1_16(short v) { return each<I, uint16_t>([=](int) { return uint16_t(v); }); }
BITLINE_SLOW I set1_32(int v) { return each<I, uint32_t>([=](int) { return uint32_t(v); }); }
BITLINE_SLOW I set1_64(long long v) { return each<I, uint64_t>([=](int) { return uint64_t(v); }); }
BITLINE_SLOW F set1_f32(float v) { return each<F, float>([=](int) { return v; }); }
template <class... T> BITLINE_SLOW I setr_32(T... v) {
  const int32_t values[16] = {int32_t(v)...};
  return load64<I>(values);
}
template <class L> BITLINE_SLOW I shift_left(I a, unsigned by) {
  const L x(a);
  constexpr unsigned bits = 8 * sizeof(L{}.e[0]);
  L r;
  for (int i = 0; i < L::count; ++i) r.e[i] = by < bits ? decltype(r.e[0] + 0)(x.e[i]) << by : 0;
  return r;
}
template <class L> BITLINE_SLOW I shift_right(I a, unsigned by) {
  const L x(a);
  constexpr unsigned bits = 8 * sizeof(L{}.e[0]);
  L r;
  for (int i = 0; i < L::count; ++i) r.e[i] = by < bits ? x.e[i] >> by : 0;
  return r;
}
BITLINE_SLOW unsigned low_count(__m128i v) {
  uint64_t n;
  memcpy(&n, &v, 8);
  return n > 64 ? 64 : unsigned(n);
}
template <class L> BITLINE_SLOW I permute1(I index, I a) {
  const L i(index), x(a);
  L r;
  for (int j = 0; j < L::count; ++j) r.e[j] = x.e[i.e[j] % L::count];
  return r;
}
template <class L> BITLINE_SLOW I permute2(I a, I index, I b) {
  const L x(a), i(index), y(b);
  L r;
  for (int j = 0; j < L::count; ++j) {
    const int at = i.e[j] % (2 * L::count);
    r.e[j] = at < L::count ? x.e[at] : y.e[at - L::count];
  }
  return r;
}
BITLINE_SLOW F permute_ps(I index, F a) {
  const U32 i(index);
  const F32 x(a);
  return each<F, float>([&](int j) { return x.e[i.e[j] % 16]; });
}
BITLINE_SLOW I ternary(I a, I b, I c, int table) {
  const U64 x(a), y(b), z(c);
  U64 r;
  for (int i = 0; i < 8; ++i)
    for (int row = 0; row < 8; ++row)
      if (table >> row & 1) r.e[i] |= (row & 4 ? x.e[i] : ~x.e[i]) & (row & 2 ? y.e[i] : ~y.e[i]) & (row & 1 ? z.e[i] : ~z.e[i]);
  return r;
}
template <class L, int HALF> BITLINE_SLOW I unpack(I a, I b) {  // within each 16 bytes
  const L x(a), y(b);
  constexpr int per = 16 / sizeof(L{}.e[0]);
  L r;
  for (int lane = 0; lane < L::count; lane += per)
    for (int i = 0; i < per / 2; ++i) {
      r.e[lane + 2 * i] = x.e[lane + HALF * per / 2 + i];
      r.e[lane + 2 * i + 1] = y.e[lane + HALF * per / 2 + i];
    }
  return r;
}
BITLINE_SLOW I shuffle_i32x4(I a, I b, int control) {
  const U64 x(a), y(b);
  U64 r;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) r.e[2 * i + j] = (i < 2 ? x : y).e[2 * (control >> 2 * i & 3) + j];
  return r;
}
BITLINE_SLOW I rotate_left_32(I a, I by) {
  const U32 x(a), n(by);
  return each<I, uint32_t>([&](int i) { return n.e[i] % 32 ? x.e[i] << n.e[i] % 32 | x.e[i] >> (32 - n.e[i] % 32) : x.e[i]; });
}
BITLINE_SLOW I multishift(I control, I a) {
  const U8 c(control);
  const U64 x(a);
  return each<I, uint8_t>([&](int i) {
    const int by = c.e[i] & 63;
    return uint8_t(by ? x.e[i / 8] >> by | x.e[i / 8] << (64 - by) : x.e[i / 8]);
  });
}
BITLINE_SLOW I broadcast_128(__m128i v) {
  uint8_t e[16];
  memcpy(e, &v, 16);
  return each<I, uint8_t>([&](int i) { return e[i % 16]; });
}
BITLINE_SLOW I shuffle_8(I a, I index) {  // within each 16 bytes
  const U8 x(a), i(index);
  return each<I, uint8_t>([&](int j) { return i.e[j] & 128 ? 0 : x.e[j / 16 * 16 + i.e[j] % 16]; });
}
BITLINE_SLOW __mmask64 movepi8_mask(I a) {
  const U8 x(a);
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= uint64_t(x.e[i] >> 7) << i;
  return mask;
}
BITLINE_SLOW I blend_8(__mmask64 mask, I a, I b) {
  const U8 x(a), y(b);
  return each<I, uint8_t>([&](int i) { return mask >> i & 1 ? y.e[i] : x.e[i]; });
}
BITLINE_SLOW F fmadd(F a, F b, F c) {
  const F32 x(a), y(b), z(c);
  return each<F, float>([&](int i) { return fused(x.e[i], y.e[i], z.e[i]); });
}
BITLINE_SLOW I add_32(I a, I b) {
  const U32 x(a), y(b);
  return each<I, uint32_t>([&](int i) { return x.e[i] + y.e[i]; });
}
BITLINE_SLOW F to_f32(I a) {
  const S32 x(a);
  return each<F, float>([&](int i) { return float(x.e[i]); });
}
template <class E, class V> BITLINE_SLOW I widen_to_32(V v) {  // 16 elements
  E e[16];
  memcpy(e, &v, sizeof e);
  return each<I, int32_t>([&](int i) { return int32_t(e[i]); });
}
BITLINE_SLOW F f16_to_f32(__m256i v) {
  uint16_t e[16];
  memcpy(e, &v, 32);
  return each<F, float>([&](int i) { return _cvtsh_ss(e[i]); });
}
BITLINE_SLOW __m256i f32_to_f16(F v) {
  const F32 x(v);
  uint16_t e[16];
  for (int i = 0; i < 16; ++i) e[i] = _cvtss_sh(x.e[i], _MM_FROUND_TO_NEAREST_INT);
  __m256i r;
  memcpy(&r, e, 32);
  return r;
}
BITLINE_SLOW __m256i f32_to_bf16x16(F v) {
  const F32 x(v);
  uint16_t e[16];
  for (int i = 0; i < 16; ++i) e[i] = f32_to_bf16(x.e[i]);
  __m256i r;
  memcpy(&r, e, 32);
  return r;
}
BITLINE_SLOW I f32_to_bf16x32(F high, F low) {
  const F32 h(high), l(low);
  return each<I, uint16_t>([&](int i) { return f32_to_bf16(i < 16 ? l.e[i] : h.e[i - 16]); });
}
BITLINE_SLOW F dot_bf16(F acc, I a, I b) {
  const F32 c(acc);
  const U16 x(a), y(b);
  return each<F, float>([&](int i) {
    const float odd = fused(bf16_to_f32(x.e[2 * i + 1]), bf16_to_f32(y.e[2 * i + 1]), c.e[i]);
    return fused(bf16_to_f32(x.e[2 * i]), bf16_to_f32(y.e[2 * i]), odd);
  });
}
BITLINE_SLOW I dot_u8s8(I acc, I a, I b) {
  const S32 c(acc);
  const U8 x(a);
  const Lanes<int8_t> y(b);
  return each<I, int32_t>([&](int i) {
    int32_t s = c.e[i];
    for (int j = 0; j < 4; ++j) s += int32_t(x.e[4 * i + j]) * y.e[4 * i + j];
    return s;
  });
}
// Masked loads and stores touch only the elements of the mask.
template <class V, class E> BITLINE_SLOW V load_masked(uint64_t mask, const void* p) {
  E e[sizeof(V) / sizeof(E)] = {};
  for (size_t i = 0; i < sizeof(V) / sizeof(E); ++i)
    if (mask >> i & 1) memcpy(e + i, static_cast<const char*>(p) + i * sizeof(E), sizeof(E));
  V v;
  memcpy(&v, e, sizeof v);
  return v;
}
template <class E, class V> BITLINE_SLOW void store_masked(void* p, uint64_t mask, V v) {
  E e[sizeof(V) / sizeof(E)];
  memcpy(e, &v, sizeof v);
  for (size_t i = 0; i < sizeof(V) / sizeof(E); ++i)
    if (mask >> i & 1) memcpy(static_cast<char*>(p) + i * sizeof(E), e + i, sizeof(E));
}

// ---- AMX: eight tiles of a thread -----------------------------------------------------------------------------------------

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
struct TileState {
  TileConfig config;
  uint8_t tile[8][16][64];
};
inline thread_local TileState tiles;

BITLINE_SLOW void check(bool ok) {
  if (!ok) __builtin_trap();  // as the CPU raises #UD
}
BITLINE_SLOW void tile_load_config(const void* p) {
  memcpy(&tiles.config, p, 64);
  check(tiles.config.palette == 1 && tiles.config.start_row == 0);
  for (int i = 0; i < 8; ++i) check(tiles.config.rows[i] <= 16 && tiles.config.row_bytes[i] <= 64);
  memset(tiles.tile, 0, sizeof tiles.tile);
}
BITLINE_SLOW void tile_release() { memset(&tiles, 0, sizeof tiles); }
BITLINE_SLOW void tile_zero(int t) {
  check(tiles.config.palette == 1);
  memset(tiles.tile[t], 0, 1024);
}
BITLINE_SLOW void tile_load(int t, const void* p, int64_t stride) {
  check(tiles.config.palette == 1);
  memset(tiles.tile[t], 0, 1024);
  for (int r = 0; r < tiles.config.rows[t]; ++r)
    memcpy(tiles.tile[t][r], static_cast<const char*>(p) + r * stride, tiles.config.row_bytes[t]);
}
BITLINE_SLOW void tile_store(int t, void* p, int64_t stride) {
  check(tiles.config.palette == 1);
  for (int r = 0; r < tiles.config.rows[t]; ++r)
    memcpy(static_cast<char*>(p) + r * stride, tiles.tile[t][r], tiles.config.row_bytes[t]);
}
// c [m][n] += a [m][k] * b [k][n] of 32-bit elements, each `Dot` of four bytes.
template <class Acc, class Dot> BITLINE_SLOW void tile_dot(int c, int a, int b, Dot dot) {
  const TileConfig& t = tiles.config;
  check(t.palette == 1 && t.rows[c] == t.rows[a] && t.row_bytes[c] == t.row_bytes[b] && t.row_bytes[a] == 4 * t.rows[b]);
  for (int m = 0; m < t.rows[c]; ++m)
    for (int n = 0; n < t.row_bytes[c] / 4; ++n) {
      Acc sum;
      memcpy(&sum, tiles.tile[c][m] + 4 * n, 4);
      sum = dot(sum, tiles.tile[a][m], n, t.rows[b], b);
      memcpy(tiles.tile[c][m] + 4 * n, &sum, 4);
    }
}
BITLINE_SLOW void tile_dpbf16ps(int c, int a, int b) {
  tile_dot<float>(c, a, b, [](float sum, const uint8_t* x, int n, int count, int tb) {
    float partial[2] = {};  // even and odd k
    for (int k = 0; k < count; ++k)
      for (int i = 0; i < 2; ++i) {
        uint16_t u, v;
        memcpy(&u, x + 4 * k + 2 * i, 2), memcpy(&v, tiles.tile[tb][k] + 4 * n + 2 * i, 2);
        partial[i] = fused(bf16_to_f32(u), bf16_to_f32(v), partial[i]);
      }
    return sum + (partial[0] + partial[1]);
  });
}
template <class A, class B> BITLINE_SLOW void tile_dot_int8(int c, int a, int b) {
  tile_dot<int32_t>(c, a, b, [](int32_t sum, const uint8_t* x, int n, int count, int tb) {
    for (int k = 0; k < count; ++k)
      for (int i = 0; i < 4; ++i) sum += int32_t(A(x[4 * k + i])) * int32_t(B(tiles.tile[tb][k][4 * n + i]));
    return sum;
  });
}

}  // namespace
}  // namespace bitline_emulation

// Macros of GCC's own header.
#undef _mm512_setr_epi32
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#define _mm512_set1_epi8(v) bitline_emulation::set1_8(v)
#define _mm512_set1_epi16(v) bitline_emulation::set1_16(v)
#define _mm512_set1_epi32(v) bitline_emulation::set1_32(v)
#define _mm512_set1_epi64(v) bitline_emulation::set1_64(v)
#define _mm512_set1_ps(v) bitline_emulation::set1_f32(v)
#define _mm512_setr_epi32(...) bitline_emulation::setr_32(__VA_ARGS__)
#define _mm512_setzero_ps() (__m512{})
#define _mm512_setzero_si512() (__m512i{})
#define _mm512_castsi512_ps(v) ((__m512)(v))
#define _mm512_castps_si512(v) ((__m512i)(v))
#define _mm512_loadu_si512(p) bitline_emulation::load64<__m512i>(p)
#define _mm512_load_si512(p) bitline_emulation::load64<__m512i>(p)
#define _mm512_loadu_ps(p) bitline_emulation::load64<__m512>(p)
#define _mm512_load_ps(p) bitline_emulation::load64<__m512>(p)
#define _mm512_storeu_si512(p, v) bitline_emulation::store_masked<uint64_t>(p, 255, v)
#define _mm512_store_si512(p, v) bitline_emulation::store_masked<uint64_t>(p, 255, v)
#define _mm512_stream_si512(p, v) bitline_emulation::store_masked<uint64_t>(p, 255, v)
#define _mm512_storeu_ps(p, v) bitline_emulation::store_masked<uint64_t>(p, 255, v)
#define _mm512_store_ps(p, v) bitline_emulation::store_masked<uint64_t>(p, 255, v)
#define _mm512_maskz_loadu_ps(m, p) bitline_emulation::load_masked<__m512, float>(m, p)
#define _mm512_maskz_loadu_epi8(m, p) bitline_emulation::load_masked<__m512i, uint8_t>(m, p)
#define _mm256_maskz_loadu_epi16(m, p) bitline_emulation::load_masked<__m256i, uint16_t>(m, p)
#define _mm512_mask_storeu_ps(p, m, v) bitline_emulation::store_masked<float>(p, m, v)
#define _mm512_mask_storeu_epi8(p, m, v) bitline_emulation::store_masked<uint8_t>(p, m, v)
#define _mm256_mask_storeu_epi16(p, m, v) bitline_emulation::store_masked<uint16_t>(p, m, v)
#define _mm512_and_si512(a, b) ((__m512i)((a) & (b)))
#define _mm512_or_si512(a, b) ((__m512i)((a) | (b)))
#define _mm512_xor_si512(a, b) ((__m512i)((a) ^ (b)))
#define _mm512_ternarylogic_epi32(a, b, c, table) bitline_emulation::ternary(a, b, c, table)
#define _mm512_slli_epi16(a, n) bitline_emulation::shift_left<bitline_emulation::U16>(a, n)
#define _mm512_srli_epi16(a, n) bitline_emulation::shift_right<bitline_emulation::U16>(a, n)
#define _mm512_slli_epi32(a, n) bitline_emulation::shift_left<bitline_emulation::U32>(a, n)
#define _mm512_srli_epi32(a, n) bitline_emulation::shift_right<bitline_emulation::U32>(a, n)
#define _mm512_sll_epi32(a, n) _mm512_slli_epi32(a, bitline_emulation::low_count(n))
#define _mm512_srl_epi32(a, n) _mm512_srli_epi32(a, bitline_emulation::low_count(n))
#define _mm512_srl_epi16(a, n) _mm512_srli_epi16(a, bitline_emulation::low_count(n))
#define _mm512_srl_epi64(a, n) bitline_emulation::shift_right<bitline_emulation::U64>(a, bitline_emulation::low_count(n))
#define _mm512_rolv_epi32(a, n) bitline_emulation::rotate_left_32(a, n)
#define _mm512_multishift_epi64_epi8(c, a) bitline_emulation::multishift(c, a)
#define _mm512_permutexvar_epi8(i, a) bitline_emulation::permute1<bitline_emulation::U8>(i, a)
#define _mm512_permutexvar_epi16(i, a) bitline_emulation::permute1<bitline_emulation::U16>(i, a)
#define _mm512_permutexvar_ps(i, a) bitline_emulation::permute_ps(i, a)
#define _mm512_permutex2var_epi8(a, i, b) bitline_emulation::permute2<bitline_emulation::U8>(a, i, b)
#define _mm512_permutex2var_epi16(a, i, b) bitline_emulation::permute2<bitline_emulation::U16>(a, i, b)
#define _mm512_unpacklo_epi32(a, b) bitline_emulation::unpack<bitline_emulation::U32, 0>(a, b)
#define _mm512_unpackhi_epi32(a, b) bitline_emulation::unpack<bitline_emulation::U32, 1>(a, b)
#define _mm512_unpacklo_epi64(a, b) bitline_emulation::unpack<bitline_emulation::U64, 0>(a, b)
#define _mm512_unpackhi_epi64(a, b) bitline_emulation::unpack<bitline_emulation::U64, 1>(a, b)
#define _mm512_shuffle_i32x4(a, b, c) bitline_emulation::shuffle_i32x4(a, b, c)
#define _mm512_broadcast_i32x4(a) bitline_emulation::broadcast_128(a)
#define _mm512_shuffle_epi8(a, i) bitline_emulation::shuffle_8(a, i)
#define _mm512_movepi8_mask(a) bitline_emulation::movepi8_mask(a)
#define _mm512_mask_blend_epi8(m, a, b) bitline_emulation::blend_8(m, a, b)
#define _mm512_add_epi32(a, b) bitline_emulation::add_32(a, b)
#define _mm512_add_ps(a, b) ((__m512)((a) + (b)))
#define _mm512_sub_ps(a, b) ((__m512)((a) - (b)))
#define _mm512_mul_ps(a, b) ((__m512)((a) * (b)))
#define _mm512_fmadd_ps(a, b, c) bitline_emulation::fmadd(a, b, c)
#define _mm512_cvtepi32_ps(a) bitline_emulation::to_f32(a)
#define _mm512_cvtepi8_epi32(a) bitline_emulation::widen_to_32<int8_t>(a)
#define _mm512_cvtepu8_epi32(a) bitline_emulation::widen_to_32<uint8_t>(a)
#define _mm512_cvtepu16_epi32(a) bitline_emulation::widen_to_32<uint16_t>(a)
#define _mm512_cvtph_ps(a) bitline_emulation::f16_to_f32(a)
#define _mm512_cvtps_ph(a, rounding) bitline_emulation::f32_to_f16(a)
#define _mm512_cvtneps_pbh(a) bitline_emulation::f32_to_bf16x16(a)
#define _mm512_cvtne2ps_pbh(a, b) bitline_emulation::f32_to_bf16x32(a, b)
#define _mm512_dpbf16_ps(c, a, b) bitline_emulation::dot_bf16(c, (__m512i)(a), (__m512i)(b))
#define _mm512_dpbusd_epi32(c, a, b) bitline_emulation::dot_u8s8(c, a, b)
#define _tile_loadconfig(p) bitline_emulation::tile_load_config(p)
#define _tile_release() bitline_emulation::tile_release()
#define _tile_zero(t) bitline_emulation::tile_zero(t)
#define _tile_loadd(t, p, stride) bitline_emulation::tile_load(t, p, stride)
#define _tile_stream_loadd(t, p, stride) bitline_emulation::tile_load(t, p, stride)
#define _tile_stored(t, p, stride) bitline_emulation::tile_store(t, p, stride)
#define _tile_dpbf16ps(c, a, b) bitline_emulation::tile_dpbf16ps(c, a, b)
#define _tile_dpbssd(c, a, b) bitline_emulation::tile_dot_int8<int8_t, int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) bitline_emulation::tile_dot_int8<int8_t, uint8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) bitline_emulation::tile_dot_int8<uint8_t, int8_t>(c, a, b)

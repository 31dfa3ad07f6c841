// The input of a quantized layer as its kernels read it: gathered, quantized where the scheme asks for it, cut into tiles.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "gemm.h"
#include "variants/transpose.h"

namespace bitline::BITLINE_LEVEL {
namespace {

typedef float Floats __attribute__((vector_size(64)));

uint32_t bits_of(float v) {
  uint32_t b;
  memcpy(&b, &v, 4);
  return b;
}
float from_bits(uint32_t b) {
  float v;
  memcpy(&v, &b, 4);
  return v;
}

// n numbers at x as float32.
void widen(const void* x, int64_t n, Dtype dtype, float* out) {
  if (dtype == kX32) {
    memcpy(out, x, size_t(n) * 4);
    return;
  }
  const uint16_t* h = static_cast<const uint16_t*>(x);
  if (dtype == kXB16) {
    for (int64_t i = 0; i < n; ++i) out[i] = from_bits(uint32_t(h[i]) << 16);
    return;
  }
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
  for (; i < n; ++i) out[i] = _cvtsh_ss(h[i]);
}

// Smallest, largest, and whether all are finite (x - x is 0 for a finite x alone).
bool extent(const float* v, int64_t n, float* low, float* high) {
  Floats l = Floats{} + v[0], h = l, odd{};
  const auto take = [&](const Floats& x) { l = x < l ? x : l, h = x > h ? x : h, odd += x - x; };
  int64_t i = 0;
  Floats x = l;
  for (; i + 16 <= n; i += 16) {
    memcpy(&x, v + i, sizeof x);
    take(x);
  }
  memcpy(&x, v + i, size_t(n - i) * 4);  // what is behind the end was there before
  take(x);
  float bad = 0;
  *low = l[0], *high = h[0];
  for (int j = 0; j < 16; ++j) *low = l[j] < *low ? l[j] : *low, *high = h[j] > *high ? h[j] : *high, bad += odd[j];
  return bad == 0;
}

bool range(const void* x, int64_t n, Dtype dtype, float* low, float* high) {
  const int64_t size = dtype == kX32 ? 4 : 2;
  float part[1024];
  bool finite = true;
  for (int64_t i = 0; i < n; i += 1024) {
    const int64_t some = n - i < 1024 ? n - i : 1024;
    widen(static_cast<const uint8_t*>(x) + i * size, some, dtype, part);
    float l, h;
    finite &= extent(part, some, &l, &h);
    *low = i == 0 || l < *low ? l : *low, *high = i == 0 || h > *high ? h : *high;
  }
  return finite;
}

// Nearest E4M3 value, ties to even: 3 bits of mantissa, steps of 2**-9 below 2**-6. |v| <= 448.
float to_e4m3(float v) {
  const uint32_t b = bits_of(v);
  const float normal = from_bits((b + 0x7ffff + ((b >> 20) & 1)) & 0xfff00000);
  const float tiny = __builtin_rintf(v * 512.0f) / 512.0f;
  return __builtin_fabsf(v) < 0x1p-6f ? tiny : normal;
}

// Replace values by the numbers that their codes stand for before scaling. scale: NaN where the row has a NaN or an infinity.
void quantize(const Meta& w, float scale, int zero, float* v, int64_t n) {
  if (scale != scale) {
    memset(v, 0, size_t(n) * 4);
  } else if (w.act == kFP8) {
    for (int64_t i = 0; i < n; ++i) {
      const float q = v[i] / scale;
      v[i] = to_e4m3(q < -448 ? -448 : q > 448 ? 448 : q);
    }
  } else {
    const float z = float(zero);
    for (int64_t i = 0; i < n; ++i) {
      const float q = __builtin_rintf(v[i] / scale + z);
      v[i] = (q < -128 ? -128 : q > 127 ? 127 : q) - z;
    }
  }
}

// A row's numbers by packed column, zero in padding.
void gather(const Meta& w, const uint8_t* base, const float* from, float* to) {
  const int32_t* map = reinterpret_cast<const int32_t*>(base + w.map);
  for (int64_t i = 0; i < w.kp; ++i) to[i] = map[i] < 0 ? 0 : from[map[i]];
}

// n numbers to words.
void encode(Mode mode, const Meta& w, const float* v, int64_t n, uint32_t* out) {
  if (mode == kBF16Mode) {
    for (int64_t i = 0; i < n / 2; ++i) out[i] = bits_of(v[2 * i]) >> 16 | (bits_of(v[2 * i + 1]) & 0xffff0000);
  } else if (mode == kF32Mode) {
    memcpy(out, v, size_t(n) * 4);
  } else {
    // Within 4 bytes of a step of 8-bit codes, or 8 of 4-bit ones, columns lie as the codes do.
    static constexpr uint8_t order[2][16] = {{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15},
                                             {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15}};
    const __m128i at = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order[w.width == 8]));
    int8_t* bytes = reinterpret_cast<int8_t*>(out);
    int64_t i = 0;
    const auto four = [&](int64_t j) { return _mm_cvttps_epi32(_mm_loadu_ps(v + i + j)); };
    for (; i + 16 <= n; i += 16) {
      const __m128i b = _mm_packs_epi16(_mm_packs_epi32(four(0), four(4)), _mm_packs_epi32(four(8), four(12)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), _mm_shuffle_epi8(b, at));
    }
    for (int64_t j = 0; i + j < n; ++j) bytes[i + j] = int8_t(int(v[i + order[w.width == 8][j]]));
  }
}

float sum_of(const float* v, int64_t n) {
  float s[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) s[j] += v[i + j];
  for (; i < n; ++i) s[0] += v[i];
  for (int step = 8; step > 0; step /= 2)
    for (int j = 0; j < step; ++j) s[j] += s[j + step];
  return s[0];
}

// Words of a tile's rows, [row][words] and `stride` bytes apart, to [word][rows].
void interleave(const uint8_t* from, int64_t rows, int64_t words, int64_t stride, uint32_t* to) {
  const auto row = [&](int64_t r) { return from + r * stride; };
  int64_t i = 0;
  // Whole vectors are stored, what is behind a word's rows is overwritten by the next word; so the last words are left over.
  for (; i + 2 * kBlock <= words; i += kBlock) {
    Words x[kTile / kBlock + 1][kBlock];
    for (int64_t r = 0; r < rows; ++r) x[r / kBlock][r % kBlock] = load(reinterpret_cast<const uint32_t*>(row(r)) + i);
    for (int64_t r = 0; r < rows; r += kBlock) transpose_block(x[r / kBlock]);
    for (int64_t j = 0; j < kBlock; ++j)
      for (int64_t r = 0; r < rows; r += kBlock) store(to + (i + j) * rows + r, x[r / kBlock][j]);
  }
  for (; i < words; ++i)
    for (int64_t r = 0; r < rows; ++r) memcpy(to + i * rows + r, row(r) + 4 * i, 4);
}

void prepare(const Call& c, int64_t tile, float* room) {
  const Meta& w = *c.w;
  const int64_t first = tile_start(c, tile), rows = tile_start(c, tile + 1) - first;
  const int64_t size = c.dtype == kX32 ? 4 : 2;
  float* sums = const_cast<float*>(c.sums) + first * w.groups;
  int32_t* starts = const_cast<int32_t*>(c.starts) + first * w.groups;
  const bool int8 = c.mode == kI8Mode, sum = int8 || w.offset_type != kNone;
  const bool same = c.mode == kBF16Mode && w.act == kPlain && !w.map;  // the words are the input's own
  const bool whole = same && w.k % 2 == 0 && rows > 1;                 // and none is of one number and padding
  float *wide = room, *tidy = room + w.kp;
  uint32_t* words = const_cast<uint32_t*>(c.xp) + first * c.words;
  uint32_t* rowwise = rows == 1 ? words : reinterpret_cast<uint32_t*>(room + 2 * w.kp);
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t* out = rowwise + r * c.words;
    const uint8_t* x = static_cast<const uint8_t*>(c.x) + (first + r) * w.k * size;
    float scale = c.tensor_scale;
    int zero = c.tensor_zero;
    if (w.act != kPlain) {
      float low, high;
      const bool finite = range(x, w.k, c.dtype, &low, &high);
      if (w.reach == kToken) quantizer(w, low, high, &scale, &zero);
      if (!finite) scale = __builtin_nanf("");
      const_cast<float*>(c.row_scale)[first + r] = scale;
    }
    if (whole && !sum) continue;
    if (same && !whole) {
      memcpy(out, x, size_t(w.k) * 2);
      memset(reinterpret_cast<uint8_t*>(out) + w.k * 2, 0, size_t(w.kp - w.k) * 2);
      if (!sum) continue;
    }
    if (w.map) {
      widen(x, w.k, c.dtype, wide);
      if (w.act != kPlain) quantize(w, scale, zero, wide, w.k);
      gather(w, c.base, wide, tidy);
    }
    for (int64_t g = 0; g < w.groups; ++g) {  // a group at a time stays in the nearest cache
      float* v = w.map ? tidy + g * w.run : tidy;
      if (!w.map) {
        const int64_t at = g * w.run, left = w.k - at, n = left < 0 ? 0 : left < w.run ? left : w.run;
        widen(x + at * size, n, c.dtype, v);
        if (w.act != kPlain) quantize(w, scale, zero, v, n);
        memset(v + n, 0, size_t(w.run - n) * 4);
      }
      if (!same) encode(c.mode, w, v, w.run, out + g * (c.words / w.groups));
      if (!sum) continue;
      const float s = sum_of(v, w.run);
      sums[g * rows + r] = s;
      if (int8) starts[g * rows + r] = -int32_t(w.center) * int32_t(s);
    }
  }
  if (whole) {
    interleave(static_cast<const uint8_t*>(c.x) + first * w.k * size, rows, w.k / 2, w.k * size, words);
    memset(words + w.k / 2 * rows, 0, size_t((c.words - w.k / 2) * rows) * 4);
  } else if (rows > 1) {
    interleave(reinterpret_cast<const uint8_t*>(rowwise), rows, c.words, c.words * 4, words);
  }
}

}  // namespace
}  // namespace bitline::BITLINE_LEVEL

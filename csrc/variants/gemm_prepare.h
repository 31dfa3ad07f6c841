// The input of a quantized layer as its kernels read it: gathered, quantized where the scheme asks for it, cut into tiles.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "gemm.h"

namespace bitline::BITLINE_LEVEL {
namespace {

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
  float l[16], h[16], odd[16];
  for (int j = 0; j < 16; ++j) l[j] = h[j] = v[0], odd[j] = 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) {
      const float x = v[i + j];
      l[j] = x < l[j] ? x : l[j], h[j] = x > h[j] ? x : h[j], odd[j] += x - x;
    }
  for (; i < n; ++i) l[0] = v[i] < l[0] ? v[i] : l[0], h[0] = v[i] > h[0] ? v[i] : h[0], odd[0] += v[i] - v[i];
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

// Replace values by the numbers that their codes stand for before scaling; gives the scale. A row with a NaN gets NaN.
float quantize(const Call& c, float* v) {
  const Meta& w = *c.w;
  float low, high, scale = c.tensor_scale;
  int zero = c.tensor_zero;
  const bool finite = extent(v, w.k, &low, &high);
  if (w.reach == kToken) quantizer(w, low, high, &scale, &zero);
  if (!finite || scale != scale) {
    memset(v, 0, size_t(w.k) * 4);
    return __builtin_nanf("");
  }
  if (w.act == kFP8) {
    for (int64_t i = 0; i < w.k; ++i) {
      const float q = v[i] / scale;
      v[i] = to_e4m3(q < -448 ? -448 : q > 448 ? 448 : q);
    }
  } else {
    const float z = float(zero);
    for (int64_t i = 0; i < w.k; ++i) {
      const float q = __builtin_rintf(v[i] / scale + z);
      v[i] = (q < -128 ? -128 : q > 127 ? 127 : q) - z;
    }
  }
  return scale;
}

// A row's numbers by packed column, zero in padding.
void arrange(const Meta& w, const uint8_t* base, const float* from, float* to) {
  if (w.map) {
    const int32_t* map = reinterpret_cast<const int32_t*>(base + w.map);
    for (int64_t i = 0; i < w.kp; ++i) to[i] = map[i] < 0 ? 0 : from[map[i]];
  } else {
    memcpy(to, from, size_t(w.k) * 4);
    memset(to + w.k, 0, size_t(w.kp - w.k) * 4);
  }
}

// Numbers to words, in place where a word is a number.
void encode(Mode mode, const Meta& w, const float* v, uint32_t* out) {
  if (mode == kBF16Mode) {
    for (int64_t i = 0; i < w.kp / 2; ++i) out[i] = bits_of(v[2 * i]) >> 16 | (bits_of(v[2 * i + 1]) & 0xffff0000);
  } else if (mode == kF32Mode) {
    if (reinterpret_cast<const void*>(v) != out) memcpy(out, v, size_t(w.kp) * 4);
  } else {
    const int order[2][8] = {{0, 4, 1, 5, 2, 6, 3, 7}, {0, 2, 1, 3, 4, 6, 5, 7}};
    const int* at = order[w.width == 8];
    int8_t* bytes = reinterpret_cast<int8_t*>(out);
    for (int64_t i = 0; i < w.kp; i += 4)
      for (int j = 0; j < 4; ++j) {
        const int64_t from = w.width == 8 ? i + at[j] : i / 8 * 8 + at[i % 8 + j];
        bytes[i + j] = int8_t(int(v[from]));
      }
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

// Words of a tile's rows, [row][words] to [word][rows].
void interleave(const uint32_t* from, int64_t rows, int64_t words, int64_t stride, uint32_t* to) {
  for (int64_t i = 0; i < words; i += 16) {
    const int64_t end = i + 16 < words ? i + 16 : words;
    for (int64_t j = i; j < end; ++j)
      for (int64_t r = 0; r < rows; ++r) to[j * rows + r] = from[r * stride + j];
  }
}

void prepare(const Call& c, int64_t tile, float* room) {
  const Meta& w = *c.w;
  const int64_t first = tile_start(c, tile), rows = tile_start(c, tile + 1) - first;
  const int64_t size = c.dtype == kX32 ? 4 : 2;
  float* sums = const_cast<float*>(c.sums) + first * w.groups;
  int32_t* starts = const_cast<int32_t*>(c.starts) + first * w.groups;
  const bool int8 = c.mode == kI8Mode, sum = int8 || w.offset_type != kNone;
  float *wide = room, *tidy = room + w.kp;
  uint32_t* rowwise = reinterpret_cast<uint32_t*>(room + 2 * w.kp);
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t* out = rowwise + r * c.words;
    const uint8_t* x = static_cast<const uint8_t*>(c.x) + (first + r) * w.k * size;
    if (c.mode == kBF16Mode && w.act == kPlain && !w.map && !sum) {
      memcpy(out, x, size_t(w.k) * 2);
      memset(reinterpret_cast<uint8_t*>(out) + w.k * 2, 0, size_t(w.kp - w.k) * 2);
      continue;
    }
    widen(x, w.k, c.dtype, wide);
    if (w.act != kPlain) const_cast<float*>(c.row_scale)[first + r] = quantize(c, wide);
    arrange(w, c.base, wide, tidy);
    encode(c.mode, w, tidy, out);
    for (int64_t g = 0; sum && g < w.groups; ++g) {
      const float s = sum_of(tidy + g * w.run, w.run);
      sums[g * rows + r] = s;
      if (int8) starts[g * rows + r] = -int32_t(w.center) * int32_t(s);
    }
  }
  interleave(rowwise, rows, c.words, c.words, const_cast<uint32_t*>(c.xp) + first * c.words);
}

}  // namespace
}  // namespace bitline::BITLINE_LEVEL

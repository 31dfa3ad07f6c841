// Activations as the GEMM kernels read them: quantized where the scheme asks for it, columns gathered, converted to the compute
// type, and the rows of an M tile interleaved (the packed A of a BLAS GEMM).
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#include <string.h>

#include "gemm.h"
#include "variants/gemm_pack_slices.h"
#include "variants/transpose.h"

namespace bitline::BITLINE_ISA {
namespace {

typedef float F32xLanes __attribute__((vector_size(4 * kLanes)));

#ifdef __aarch64__
void f16_to_f32(const uint16_t* h, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + i))));
  for (; i < n; ++i) {
    __fp16 half;
    memcpy(&half, h + i, 2);
    out[i] = half;
  }
}
// 16 integers in the order of `order`.
void store_int8(const float* v, const uint8_t* order, int8_t* out) {
  const auto load8 = [&](int64_t j) {
    return vmovn_high_s32(vmovn_s32(vcvtq_s32_f32(vld1q_f32(v + j))), vcvtq_s32_f32(vld1q_f32(v + j + 4)));
  };
  vst1q_s8(out, vqtbl1q_s8(vmovn_high_s16(vmovn_s16(load8(0)), load8(8)), vld1q_u8(order)));
}
#else
void f16_to_f32(const uint16_t* h, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
  for (; i < n; ++i) out[i] = _cvtsh_ss(h[i]);
}
// 16 integers in the order of `order`.
void store_int8(const float* v, const uint8_t* order, int8_t* out) {
  const auto load4 = [&](int64_t j) { return _mm_cvttps_epi32(_mm_loadu_ps(v + j)); };
  const __m128i b = _mm_packs_epi16(_mm_packs_epi32(load4(0), load4(4)), _mm_packs_epi32(load4(8), load4(12)));
  const __m128i shuffle = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(b, shuffle));
}
#endif

// n numbers of x to float32.
void convert_to_f32(const void* x, int64_t n, Dtype dtype, float* out) {
  if (dtype == kFloat32) {
    memcpy(out, x, size_t(n) * 4);
    return;
  }
  const uint16_t* h = static_cast<const uint16_t*>(x);
  if (dtype == kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = from_bits(uint32_t(h[i]) << 16);
    return;
  }
  f16_to_f32(h, n, out);
}

// Minimum and maximum; false where some number is not finite (x - x is 0 for finite x only).
bool min_max_f32(const float* v, int64_t n, float* low, float* high) {
  F32xLanes l = F32xLanes{} + v[0], h = l, non_finite{};
  const auto update = [&](const F32xLanes& x) { l = x < l ? x : l, h = x > h ? x : h, non_finite += x - x; };
  int64_t i = 0;
  F32xLanes x = l;
  for (; i + kLanes <= n; i += kLanes) {
    memcpy(&x, v + i, sizeof x);
    update(x);
  }
  memcpy(&x, v + i, size_t(n - i) * 4);  // lanes behind the end keep values that were counted before
  update(x);
  float bad = 0;
  *low = l[0], *high = h[0];
  for (int j = 0; j < kLanes; ++j) *low = l[j] < *low ? l[j] : *low, *high = h[j] > *high ? h[j] : *high, bad += non_finite[j];
  return bad == 0;
}

bool min_max(const void* x, int64_t n, Dtype dtype, float* low, float* high) {
  const int64_t itemsize = item_bytes(dtype);
  float chunk[1024];
  bool finite = true;
  for (int64_t i = 0; i < n; i += 1024) {
    const int64_t count = n - i < 1024 ? n - i : 1024;
    convert_to_f32(static_cast<const uint8_t*>(x) + i * itemsize, count, dtype, chunk);
    float l, h;
    finite &= min_max_f32(chunk, count, &l, &h);
    *low = i == 0 || l < *low ? l : *low, *high = i == 0 || h > *high ? h : *high;
  }
  return finite;
}

// Nearest E4M3 value, ties to even: 3 mantissa bits, subnormals in steps of 2**-9 below 2**-6. |v| <= 448.
float round_to_e4m3(float v) {
  const uint32_t b = bits_of(v);
  const float normal = from_bits((b + 0x7ffff + ((b >> 20) & 1)) & 0xfff00000);
  const float subnormal = __builtin_rintf(v * 512.0f) / 512.0f;
  return __builtin_fabsf(v) < 0x1p-6f ? subnormal : normal;
}

// Replace values by their quantized ones, not yet multiplied by the scale. scale: NaN where the row has NaN or infinity.
void quantize(const PackedHeader& w, float scale, int zero, float* v, int64_t n) {
  if (scale != scale) {
    memset(v, 0, size_t(n) * 4);
  } else if (w.act_quant == kActFP8) {
    for (int64_t i = 0; i < n; ++i) {
      const float q = v[i] / scale;
      v[i] = round_to_e4m3(q < -448 ? -448 : q > 448 ? 448 : q);
    }
  } else {
    const float z = float(zero);
    for (int64_t i = 0; i < n; ++i) {
      const float q = __builtin_rintf(v[i] / scale + z);
      v[i] = (q < -128 ? -128 : q > 127 ? 127 : q) - z;
    }
  }
}

// A row by packed column, zero in padding.
void gather_columns(const PackedHeader& w, const uint8_t* base, const float* from, float* to) {
  const int32_t* map = reinterpret_cast<const int32_t*>(base + w.column_map);
  for (int64_t i = 0; i < w.k_packed; ++i) to[i] = map[i] < 0 ? 0 : from[map[i]];
}

// n numbers to the compute type: bfloat16 pairs, float32, or int8 fours, one int32 each.
void convert_to_compute_type(ComputeType compute, const PackedHeader& w, const float* v, int64_t n, uint32_t* out) {
  if (compute == kComputeBF16) {
    for (int64_t i = 0; i < n / 2; ++i) out[i] = bits_of(v[2 * i]) >> 16 | (bits_of(v[2 * i + 1]) & 0xffff0000);
  } else if (compute == kComputeF32) {
    memcpy(out, v, size_t(n) * 4);
  } else {
    // The order in which bit_position() has a K block's columns: 0 2 1 3 in the bytes of 8-bit codes; 0 4 1 5 in the low and 2
    // 6 3 7 in the high nibbles of 4-bit codes.
    static constexpr uint8_t order[2][16] = {{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15},
                                             {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15}};
    int8_t* bytes = reinterpret_cast<int8_t*>(out);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_int8(v + i, order[w.bits == 8], bytes + i);
    for (int64_t j = 0; i + j < n; ++j) bytes[i + j] = int8_t(int(v[i + order[w.bits == 8][j]]));
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

// Rows of `count` int32, `stride` bytes apart, to [count][rows].
void interleave_rows(const uint8_t* from, int64_t rows, int64_t count, int64_t stride, uint32_t* to) {
  const auto row = [&](int64_t r) { return from + r * stride; };
  int64_t i = 0;
  // Whole vectors are stored; lanes behind the last row are overwritten by the next int32's. So the last int32 are left to the
  // tail.
  for (; i + 2 * kLanes <= count; i += kLanes) {
    Vec x[kMaxTileM / kLanes + 1][kLanes];
    for (int64_t r = 0; r < rows; ++r) x[r / kLanes][r % kLanes] = load(reinterpret_cast<const uint32_t*>(row(r)) + i);
    for (int64_t r = 0; r < rows; r += kLanes) transpose_tile(x[r / kLanes]);
    for (int64_t j = 0; j < kLanes; ++j)
      for (int64_t r = 0; r < rows; r += kLanes) store(to + (i + j) * rows + r, x[r / kLanes][j]);
  }
  for (; i < count; ++i)
    for (int64_t r = 0; r < rows; ++r) memcpy(to + i * rows + r, row(r) + 4 * i, 4);
}

// Rows of `count` int32, `stride` bytes apart, to an AMX tile [K step][16][int32 of a K step], zero behind rows and columns.
void store_amx_tile(const GemmCall& c, const uint8_t* from, int64_t rows, int64_t count, int64_t stride, uint32_t* to) {
  const int64_t step = c.k_step_int32;
  for (int64_t i = 0; i < c.row_int32; i += step, to += kAmxTileM * step) {
    const int64_t n = count - i < 0 ? 0 : count - i < step ? count - i : step;
    for (int64_t r = 0; r < rows; ++r) {
      if (n == 16) {
        memcpy(to + r * 16, from + r * stride + 4 * i, 64);
        continue;
      }
      memcpy(to + r * step, from + r * stride + 4 * i, size_t(n) * 4);
      memset(to + r * step + n, 0, size_t(step - n) * 4);
    }
    if (rows < kAmxTileM) memset(to + rows * step, 0, size_t((kAmxTileM - rows) * step) * 4);
  }
}

// The activation scale of a row, NaN where the row has NaN or infinity; *zero changes with a per-token scale.
float row_act_scale(const GemmCall& c, const void* x, int* zero) {
  float low, high, scale = c.act_tensor_scale;
  const bool finite = min_max(x, c.w->k, c.dtype, &low, &high);
  if (c.w->act_granularity == kPerToken) act_quant_params(*c.w, low, high, &scale, zero);
  return finite ? scale : __builtin_nanf("");
}

void pack_activations(const GemmCall& c, int64_t m_tile, float* scratch) {
  const PackedHeader& w = *c.w;
  const int64_t first = m_tile_start(c, m_tile), rows = m_tile_start(c, m_tile + 1) - first;
  const int64_t itemsize = item_bytes(c.dtype);
  float* group_sums = const_cast<float*>(c.x_group_sums) + first * w.num_groups;
  const bool sliced = c.strategy == kInt8Slices;
  int32_t* acc_init = const_cast<int32_t*>(c.acc_init) + first * w.num_groups * (sliced ? c.slices.count : 1);
  float* x_scales = const_cast<float*>(c.slices.x_scales) + first * w.num_groups;
  const bool int8 = c.compute == kComputeInt8, needs_sums = int8 || w.offset_type != kNone;
  const bool same_bits = c.compute == kComputeBF16 && w.act_quant == kActNone && !w.column_map;  // packed x is x's own bits
  // Without a copy: no row ends in the middle of an int32.
  const bool reads_x = same_bits && w.k % 2 == 0 && (rows > 1 || c.strategy == kAmxTiles);
  const int64_t group_int32 = sliced ? w.group_k / 4 * c.slices.count : w.group_k / k_per_int32(c.compute);
  float *f32_row = scratch, *packed_row = scratch + w.k_packed;
  uint32_t* x_packed = const_cast<uint32_t*>(c.x_packed) + first * c.row_int32;
  uint32_t* row_major = rows == 1 && c.strategy != kAmxTiles ? x_packed : reinterpret_cast<uint32_t*>(scratch + 2 * w.k_packed);
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t* out = row_major + r * c.row_int32;
    const uint8_t* x = static_cast<const uint8_t*>(c.x) + (first + r) * w.k * itemsize;
    int zero = c.act_tensor_zero;
    const float scale = w.act_quant == kActNone ? 0 : row_act_scale(c, x, &zero);
    if (w.act_quant != kActNone) const_cast<float*>(c.act_scale)[first + r] = scale;
    if (reads_x && !needs_sums) continue;
    if (same_bits && !reads_x) {
      memcpy(out, x, size_t(w.k) * 2);
      memset(reinterpret_cast<uint8_t*>(out) + w.k * 2, 0, size_t(c.row_int32 * 4 - w.k * 2));
      if (!needs_sums) continue;
    }
    if (w.column_map) {
      convert_to_f32(x, w.k, c.dtype, f32_row);
      if (w.act_quant != kActNone) quantize(w, scale, zero, f32_row, w.k);
      gather_columns(w, c.base, f32_row, packed_row);
    }
    for (int64_t g = 0; g < w.num_groups; ++g) {  // a group at a time stays in L1
      float* v = w.column_map ? packed_row + g * w.group_k : packed_row;
      if (!w.column_map) {
        const int64_t k = g * w.group_k, left = w.k - k, n = left < 0 ? 0 : left < w.group_k ? left : w.group_k;
        convert_to_f32(x + k * itemsize, n, c.dtype, v);
        if (w.act_quant != kActNone) quantize(w, scale, zero, v, n);
        memset(v + n, 0, size_t(w.group_k - n) * 4);
      }
      if (sliced) pack_slices(c, v, out + g * group_int32, x_scales + g * rows + r, acc_init + g * c.slices.count * rows + r, rows);
      else if (!same_bits) convert_to_compute_type(c.compute, w, v, w.group_k, out + g * group_int32);
      if (!needs_sums) continue;
      const float s = sum_of(v, w.group_k);
      group_sums[g * rows + r] = s;
      if (int8) acc_init[g * rows + r] = -int32_t(w.implicit_zero) * int32_t(s);
    }
  }
  if (c.strategy == kAmxTiles) {
    if (reads_x) store_amx_tile(c, static_cast<const uint8_t*>(c.x) + first * w.k * itemsize, rows, w.k / 2, w.k * itemsize, x_packed);
    else store_amx_tile(c, reinterpret_cast<const uint8_t*>(row_major), rows, same_bits ? c.row_int32 : w.num_groups * group_int32,
                        c.row_int32 * 4, x_packed);
  } else if (reads_x) {
    interleave_rows(static_cast<const uint8_t*>(c.x) + first * w.k * itemsize, rows, w.k / 2, w.k * itemsize, x_packed);
    memset(x_packed + w.k / 2 * rows, 0, size_t((c.row_int32 - w.k / 2) * rows) * 4);
  } else if (rows > 1) {
    interleave_rows(reinterpret_cast<const uint8_t*>(row_major), rows, c.row_int32, c.row_int32 * 4, x_packed);
  }
}

}  // namespace
}  // namespace bitline::BITLINE_ISA

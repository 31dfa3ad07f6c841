// Scales of W and the epilogue, for the levels below AVX-512.
#pragma once

#include "gemm.h"
#include "variants/gemm_f32_dequant.h"
#include "variants/gemm_group_scales.h"
#include "variants/gemm_pack_activations.h"

namespace bitline::BITLINE_ISA {
namespace {

// Of kLanes rows of a group, whose share of y is scale * sum(code * x) + offset * sum(x).
struct ScaleOffset {
  F32 scale, offset;
};

// The factors of one N block and group.
struct ScaleRow : GroupScales {
  INLINE ScaleRow(const GemmCall& c, int64_t block, int64_t g) : GroupScales(c, block, g) {}
  INLINE ScaleOffset at(int lane) const {
    ScaleOffset a{scale(lane), F32{}};
    if (w.offset_type == kNone) return a;
    a.offset = offset(lane);
    if (w.offset_type == kZeroPoint) a.offset = -(a.scale * a.offset);
    return a;
  }
};

uint16_t to_bf16(float v) {
  const uint32_t b = bits_of(v);
  if (v != v) return uint16_t(b >> 16 | 0x40);
  return uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// 32 columns of a row of y: activation scale, bias, one rounding, store.
void epilogue(const GemmCall& c, int64_t row, int64_t block, const float* acc) {
  const int64_t n = c.w->n, first = block * kBlockN, count = n - first < kBlockN ? n - first : kBlockN;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t col = first + i, at = row * n + col;
    float v = c.act_scale ? acc[i] * c.act_scale[row] : acc[i];
    if (c.dtype == kFloat32) {
      if (c.bias) v += static_cast<const float*>(c.bias)[col];
      static_cast<float*>(c.y)[at] = v;
    } else if (c.dtype == kFloat16) {
      if (c.bias) v += f16_to_f32(static_cast<const uint16_t*>(c.bias)[col]);
      static_cast<uint16_t*>(c.y)[at] = f32_to_f16(v);
    } else {
      if (c.bias) v += from_bits(uint32_t(static_cast<const uint16_t*>(c.bias)[col]) << 16);
      static_cast<uint16_t*>(c.y)[at] = to_bf16(v);
    }
  }
}

}  // namespace
}  // namespace bitline::BITLINE_ISA

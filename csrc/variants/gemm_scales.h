// Scales of W and the epilogue, for the levels below AVX-512.
#pragma once

#include "gemm.h"
#include "variants/gemm_f32_dequant.h"
#include "variants/gemm_pack_activations.h"

namespace bitline::BITLINE_ISA {
namespace {

// Of kLanes rows of a group, whose share of y is scale * sum(code * x) + offset * sum(x).
struct ScaleOffset {
  F32 scale, offset;
};

// The scales and offsets of one N block and group.
struct ScaleRow {
  const PackedHeader& w;
  const uint8_t* base;
  int64_t first, super_first;
  INLINE ScaleRow(const GemmCall& c, int64_t block, int64_t g) : w(*c.w), base(c.base) {
    first = (block * w.num_groups + g) * kBlockN, super_first = 0;
    if (!w.super_scales) return;
    const int64_t per = w.groups_per_super_scale;
    super_first = (block * ((w.num_groups + per - 1) / per) + g / per) * kBlockN;
  }
  INLINE ScaleOffset at(int lane) const {
    const auto super = [&](int64_t section) INLINE_LAMBDA { return reinterpret_cast<const float*>(base + section) + super_first + lane; };
    ScaleOffset a{load_scales(base + w.scales, w.scale_type, first + lane, super(w.super_scales)), F32{}};
    if (w.offset_type == kNone) return a;
    a.offset = load_scales(base + w.offsets, w.offset_type, first + lane, super(w.super_offsets));
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
